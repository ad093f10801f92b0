"""Which tokens the target thought of after which: the tables of Token Recycling."""
