"""The layer and `lookahead` for models of tf_keras, among them those of TensorFlow Recommenders.

```python
import tensorflow_recommenders as tfrs                  # with TF_USE_LEGACY_KERAS=1
from tf_scratchpipe import for_tf_keras as scratchpipe
```

It needs `tf_keras`, and `import tf_scratchpipe` does not import it.
"""

try:
    import tf_keras  # noqa: F401 - to say what is missing before anything else fails.
except ImportError as error:
    raise ImportError(
        "tf_scratchpipe.for_tf_keras needs tf_keras. Install it with `pip install "
        '"tf-echo-scratchpipe[tfrs]"`, and set TF_USE_LEGACY_KERAS=1 in the environment before '
        "TensorFlow is imported, for `tf.keras` and TensorFlow Recommenders to use it too."
    ) from error

from tf_scratchpipe.tf_keras_embedding import ScratchPipeEmbedding
from tf_scratchpipe.tf_keras_lookahead import lookahead

__all__ = ["ScratchPipeEmbedding", "lookahead"]
