"""Image tokens, discrete and continuous, over the verification core.

This room is still empty: it knows pictures and never meets `ragspec.retrievers`.
"""
