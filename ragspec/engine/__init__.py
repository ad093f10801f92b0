"""The engine: a model, a drafter and a budget over the one loop."""
