"""From the keywords of a user to a rule for each tensor: groups, routes, numbers."""
