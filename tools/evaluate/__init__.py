"""The evaluation: sections that measure and are shown, suites that say what of them is run, and the report.

`draftwood evaluate` runs a suite (`suite.py`) task by task (`run.py`); a task is one row of ``rows.jsonl``.
A section (`sections/`, registered in `registry.py`) says which tasks a suite asks of it, measures one, and shows rows
as tables and figures; `draftwood report` (`report/`) draws what is there, also while a run goes on.
"""
