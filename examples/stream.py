"""Print text as it is verified; Ctrl-C ends it and keeps what was written."""

import ragspec

engine = ragspec.Engine.from_pretrained("starter")
stream = engine.stream("Speculative decoding is", max_new_tokens=40, stop=["\n\n"])
for piece in stream:
    print(piece, end="", flush=True)
print()
print(f"{len(stream.result.tokens)} tokens, ended by {stream.result.finish_reason}")
