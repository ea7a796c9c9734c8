"""The playground: a local page with a rule's text, its formula, costs, kernels, path and races.

`server.py` serves the page on the loopback address. Rules are read and run in processes of their own, `worker.py`, with
limits of time and memory; `questions.py` has what the page asks. `page/` is the page.
"""
