#!/usr/bin/env bash
# Gradients of an embedding in TensorFlow (IndexedSlices), clipped by norm or value. tf.clip_by_norm
# and clip_by_global_norm take IndexedSlices, as their pages say, and so do Keras's optimizers.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install tensorflow-cpu==2.21.0 keras==3.15.1 numpy==2.4.6

seen=$(KERAS_BACKEND=tensorflow KERAS_HOME=$folder "$python" -W ignore - 2>"$errors" <<'PYTHON'
import keras
import tensorflow as tf

TOKENS = [[0] * 100]  # one token, 100 times


def norm(gradient):
    return float(tf.norm(tf.convert_to_tensor(gradient)))


weight = tf.Variable(tf.ones((4, 1)))
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.nn.embedding_lookup(weight, TOKENS))
gradient = tape.gradient(loss, weight)
print(f"TensorFlow {tf.__version__}: a gradient with the norm {norm(gradient):.0f}")
print(f"global_norm: {tf.linalg.global_norm([gradient]):.0f}")
(clipped,), _ = tf.clip_by_global_norm([gradient], 1.0)
print(f"norm after clip_by_global_norm to 1: {norm(clipped):.0f}")
print(f"norm after clip_by_norm to 1: {norm(tf.clip_by_norm(gradient, 1.0)):.0f}")


def moved(**options):
    """By how much SGD with a rate of 1 changes the row of that token in Keras."""
    model = keras.Sequential([keras.layers.Embedding(4, 1, embeddings_initializer="zeros")])
    optimizer = keras.optimizers.SGD(1.0, **options)
    model.compile(optimizer=optimizer, loss=lambda expected, found: -tf.reduce_sum(found))
    inputs = tf.constant(TOKENS)
    model.fit(inputs, tf.zeros((1, 100, 1)), epochs=1, verbose=0)
    return round(float(model.get_weights()[0][0, 0]))


print("Keras", keras.__version__)
print("SGD moves by", moved())
for name in ("global_clipnorm", "clipnorm", "clipvalue"):
    print(f"SGD with {name}=1 moves by", moved(**{name: 1.0}))
PYTHON
)
verdict 'clipped to 1 the norm is 1, and a step with a rate of 1 moves by 1 at most' "$seen" \
  "TensorFlow 2.21.0: a gradient with the norm 100
global_norm: 10
norm after clip_by_global_norm to 1: 10
norm after clip_by_norm to 1: 10
Keras 3.15.1
SGD moves by 100
SGD with global_clipnorm=1 moves by 10
SGD with clipnorm=1 moves by 10
SGD with clipvalue=1 moves by 100"
