"""The page in a browser: a chat, the tree of its steps, and plain decoding next to it with the same text."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or ""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_steps_and_the_same_text_twice(server: Any, browser: Any, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(server.url)
    expect = pytest.importorskip("playwright.sync_api").expect
    expect(page.locator("#state")).to_have_text("ready")
    page.fill("#tokens", "24")
    page.check("#plain")
    page.fill("#prompt", "the cat")
    page.press("#prompt", "Enter")
    expect(page.locator("#same")).to_have_text("Both texts are the same.", timeout=20000)
    assert page.locator("#tree g.lit").count() >= 1
    assert page.locator("#bars rect").count() >= 1
    assert float(page.text_content("#accept")) >= 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert faults == []
    page.close()


def test_a_new_chat_during_an_answer_is_answered(server: Any, browser: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    page = browser.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    page.route("**/v1/chat/completions", lambda _: None)  # no answer comes
    page.fill("#prompt", "the cat")
    page.press("#prompt", "Enter")
    expect(page.locator("#state")).to_have_text("answering")
    page.click("#new")
    expect(page.locator("#state")).to_have_text("ready")
    assert page.locator("#log li").count() == 0
    page.unroute("**/v1/chat/completions")
    page.fill("#tokens", "8")
    page.fill("#prompt", "the hat")
    page.press("#prompt", "Enter")
    expect(page.locator("#tree g.lit")).not_to_have_count(0, timeout=60000)
    expect(page.locator("#state")).to_have_text("ready", timeout=60000)
    assert faults == []
    page.close()


def test_the_state_is_ready_again_after_trouble(server: Any, browser: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    page = browser.new_page()
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    page.route("**/health", lambda route: route.abort())
    expect(page.locator("#state")).to_have_text("the server does not answer")
    page.unroute("**/health")
    expect(page.locator("#state")).to_have_text("ready")
    page.close()


# Every answer is one word, and never ends.
HALF = """() => {
  const real = window.fetch;
  window.asked = [];
  window.fetch = (url, options) => {
    if (!url.includes("completions")) return real(url, options);
    window.asked.push(JSON.parse(options.body).messages);
    const event = 'data: {"choices": [{"delta": {"content": "half"}}]}\\n\\n';
    const start = (body) => {
      body.enqueue(new TextEncoder().encode(event));
      options.signal.addEventListener("abort", () => body.error(options.signal.reason));
    };
    return Promise.resolve(new Response(new ReadableStream({ start })));
  };
}"""


def test_a_stopped_answer_stays_in_the_conversation(server: Any, browser: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    page = browser.new_page()
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    page.evaluate(HALF)
    for number, prompt in enumerate(("one", "two")):
        page.fill("#prompt", prompt)
        page.press("#prompt", "Enter")
        expect(page.locator("#log .pair").nth(number)).to_contain_text("half")
        page.click("#stop")
        expect(page.locator("#state")).to_have_text("ready")
    assert [(message["role"], message["content"]) for message in page.evaluate("asked[1]")] == [
        *(("user", "one"), ("assistant", "half"), ("user", "two"))
    ]
    page.close()
