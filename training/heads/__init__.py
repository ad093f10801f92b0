"""Train draft heads (EAGLE) that draft for a model; `ragspec train-head` calls it."""
