"""Embedding tables larger than the GPU, trained as fast as if they fitted.

This package will hold a Keras embedding layer whose table lives in host memory or in a
memory-mapped file, and whose rows are cached on the GPU. The input pipeline looks a few batches
ahead and fetches the rows that a batch needs before its step begins, so every training lookup
finds its row on the GPU and training gives exactly the result of an uncached table. The method is
that of ScratchPipe (Kwon and Rhu, "Training Personalized Recommendation Systems from (GPU)
Scratch", ISCA 2022).

Known gap: none of it is implemented in this version; the package has no public names yet.
"""

__all__: list[str] = []
