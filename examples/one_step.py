"""The whole algorithm on one screen: draft, verify, walk, commit, until the text is long enough.

`Engine.generate` does the same for many rows at once, with a budget, stop conditions and reports.
"""

import ragspec
from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.retrievers import ContextDrafter
from ragspec.rules.target_view import RowView
from ragspec.rules.walk import Walk
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.stopping import StopRule, StopState
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.open import open_target

model, tokenizer = ragspec.load_model("starter")
target = open_target(model)  # probed: a tree gives the logits of its paths, one by one
prompt = tokenizer("A draft tree is checked in one pass. A draft tree is")["input_ids"]

distribution = TokenDistribution(
    ragspec.Sampling(temperature=0.7), NoiseStream(seed=7), len(prompt)
)
stop = StopState(StopRule(ends=frozenset(), max_new_tokens=24), tokenizer)
drafter = ContextDrafter().open(DraftRequest(tuple(prompt), target.vocab_size))
context = DraftContext(tokens=list(prompt), prompt_length=len(prompt), remaining=24)

with target.open(rows=1, capacity=len(prompt) + 24 + 8) as session:
    pending, tree, passes = list(prompt), DraftTree.empty(), 0
    while context.remaining > 0:
        # verify: one forward over what the target has not seen yet and the draft below it
        logits = session.verify([pending], [tree])
        # walk: follow the target's own tokens, argmax(log p + g), while a node has them
        verdict = Walk().judge(tree, RowView(logits[0], tree, distribution, stop, context.tokens))
        new = [int(tree.tokens[node]) for node in verdict.path]
        new += [] if verdict.token is None else [verdict.token]  # None: the text ended on the path
        # commit: keep the accepted nodes' keys and values; the last token is the next root
        session.commit([verdict.path])
        context.tokens += new
        context.remaining -= len(new)
        pending, passes = new[-1:], passes + 1
        # draft: whatever followed the same words before
        tree = drafter.propose(context, budget=min(8, max(context.remaining - 1, 0)))

written = context.tokens[len(prompt) :]
plain = ragspec.Engine(target, tokenizer, drafter=None).generate(
    prompt, ragspec.Sampling(temperature=0.7, seed=7), max_new_tokens=len(written), ignore_eos=True
)
print(tokenizer.decode(written))
print(f"{len(written)} tokens in {passes} forward passes")
print("the tokens of plain decoding:", written == plain.tokens)
