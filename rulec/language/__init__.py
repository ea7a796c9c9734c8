"""From text or Python to a `Rule`: expressions, composition, errors with line and caret."""
