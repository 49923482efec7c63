"""What the patches on verl call."""
