"""The laboratory: whatever is measured on this machine is measured here, and shown from here.

`runner.py` lets ways of decoding take turns, `timer.py` times steps, `conversations.py` builds prompts, `counting.py`
counts rank paths. `bench.py` compares one bundle with plain decoding. `draftwood evaluate` runs a suite (`suite.py`)
task by task (`run.py`); a task is one row of ``rows.jsonl``. A section (`sections/`, listed in `registry.py`) says
which tasks a suite asks of it, measures one, and shows rows as tables and figures; `draftwood report` (`report/`)
draws what is there, also while a run goes on.
"""
