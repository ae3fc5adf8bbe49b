"""Private TensorFlow, and what public call is missing for each use."""

import tensorflow as tf
from tensorflow.python.eager import record


def is_recorded(tensor: tf.Tensor) -> bool:
    """Whether a gradient tape watches a tensor. Missing: any way to ask."""
    return bool(record.should_record_backprop([tensor]))
