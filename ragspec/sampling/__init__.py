"""From logits to tokens: settings, processors, noise, stop conditions."""
