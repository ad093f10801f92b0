"""What proposes tokens, and drafters made of drafters."""
