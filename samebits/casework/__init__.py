"""From a published model to a proven case: intake, ledger, steps, layouts. Starts no engine."""
