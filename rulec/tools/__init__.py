"""Programs for people: races, the playground, the demonstration, comparisons, the language server."""
