"""Wrong calls of every entry point, run as a user runs them: without the checks of the tests.

Under pytest the annotations of the package are checked at run time, so that a wrong type never
reaches the code. Here it does. `python -m tests.wrong_calls` makes every call and prints, as JSON,
what each one raised and what it left behind.
"""
