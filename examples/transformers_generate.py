"""One more argument on `model.generate`: speculation behind the call that you already have."""

from ragspec import load_model
from ragspec.bridge import Speculation, speculative

model, tokenizer = load_model("starter")  # any AutoModelForCausalLM and its tokenizer
inputs = tokenizer("Question: What is a tuple?\nAnswer:", return_tensors="pt")

speculation = Speculation(drafter="context", tokenizer=tokenizer)
out = model.generate(
    **inputs,
    custom_generate=speculative,
    speculation=speculation,
    max_new_tokens=40,
    do_sample=False,
)
print(tokenizer.decode(out[0], skip_special_tokens=True))
print(speculation.reports[0].summary())
