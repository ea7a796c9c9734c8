"""One GPU: parts in processes of their own, within nine minutes."""
