"""Papers repeated and other programs raced: ``python -m draftwood.tools.benchmarks``, in a clone; no wheel has it.

``evaluate`` runs a suite (`suite.py`) task by task (`run.py`); a task is one row of ``rows.jsonl``. A section
(`sections/`, listed in `registry.py`) says which tasks a suite asks of it, measures one, and shows rows as tables and
figures. ``report`` (`contents.py`, `markdown.py`) draws existing rows, also while a run goes on.
"""
