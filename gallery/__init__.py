"""The gallery of the manual: a page and a card for every rule, made when the site is built.

It runs from a checkout: `hook.py` is a hook of MkDocs. It is not installed.
"""
