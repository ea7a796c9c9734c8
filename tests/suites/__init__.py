"""Test suites of other projects, run with rulec's classes in the place of theirs."""
