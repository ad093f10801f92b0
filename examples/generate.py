"""Generate text with and without speculation: the same tokens, fewer forward passes."""

import ragspec

fast = ragspec.Engine.from_pretrained("starter", drafter="context", draft_model="starter-draft")
plain = ragspec.Engine(fast.model, fast.tokenizer, drafter=None)

prompt = "Question: How do I copy a list?\nAnswer: To copy a list,"
sampling = ragspec.Sampling(temperature=0.8, top_p=0.9, seed=7)

one = fast.generate(prompt, sampling, max_new_tokens=60)
two = plain.generate(prompt, sampling, max_new_tokens=60)

print(one.text)
print("the same tokens:", one.tokens == two.tokens)
print(f"{one.report.forwards} forward passes instead of {two.report.forwards}")
print(one.report.summary())
