"""Scripts from the frameworks' own documentation, as training functions.

They are restated: objects, calls and their order are those of the page that each names. The data
are made, ``from_pretrained`` is the same architecture made from its configuration, and the number
of epochs and the rate come from the configuration. Statements that a user changes for nbtoolkit
have ``# nbtoolkit`` in their first line; there are at most two, and the import.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

# --- https://lightning.ai/docs/pytorch/stable/starter/introduction.html
# "Lightning in 15 minutes", steps 2 to 5


def lightning_in_15_minutes(config: Any, ctx: Any) -> dict[str, float]:
    import lightning as L
    from torch import nn, optim, utils

    from nbtoolkit.integrations import lightning as nbl

    encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
    decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))

    class LitAutoEncoder(L.LightningModule):
        def __init__(self, encoder: Any, decoder: Any) -> None:
            super().__init__()
            self.encoder = encoder
            self.decoder = decoder

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            slow_step(config, ctx)
            x, _ = batch
            x = x.view(x.size(0), -1)
            z = self.encoder(x)
            x_hat = self.decoder(z)
            loss = nn.functional.mse_loss(x_hat, x)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return optim.Adam(self.parameters(), lr=rate(config, ctx))

    autoencoder = LitAutoEncoder(encoder, decoder)
    dataset = digits(ctx)
    train_loader = utils.data.DataLoader(dataset, shuffle=True)
    trainer = L.Trainer(  # nbtoolkit
        **nbl.trainer_arguments(ctx, limit_train_batches=8, max_epochs=epochs(config))
    )
    trainer.fit(  # nbtoolkit
        model=autoencoder, train_dataloaders=train_loader, ckpt_path=nbl.resume_from(ctx)
    )
    return returned(trainer.callback_metrics, autoencoder)


# --- https://huggingface.co/docs/transformers/v4.56.2/training, "Fine-tuning": "Train with Trainer"
# Without push_to_hub=True; accuracy by NumPy in place of evaluate.load("accuracy").


def transformers_fine_tuning(config: Any, ctx: Any) -> dict[str, float]:
    import numpy as np
    from transformers import BertConfig, BertForSequenceClassification, Trainer

    from nbtoolkit.integrations import transformers as nbt

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            num_labels=5,
        )
    )
    model.register_forward_pre_hook(lambda module, _: slow_step(config, ctx, module.training))
    small_train, small_eval = reviews(48, 0, ctx), reviews(16, 1, None)

    def compute_metrics(eval_pred: Any) -> dict[str, float]:
        logits, labels = eval_pred
        predictions = np.argmax(logits, axis=-1)
        return {"accuracy": float((predictions == labels).mean())}

    training_args = nbt.training_arguments(  # nbtoolkit
        ctx,
        output_dir="yelp_review_classifier",
        eval_strategy="epoch",
        num_train_epochs=epochs(config),
        learning_rate=rate(config, ctx),
        logging_steps=2,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=small_train,
        eval_dataset=small_eval,
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=nbt.resume_from(ctx))  # nbtoolkit
    return returned(trainer.evaluate(), model)


# --- https://keras.io/examples/vision/mnist_convnet/, "Simple MNIST convnet"


def keras_simple_mnist_convnet(config: Any, ctx: Any) -> dict[str, float]:
    import keras
    import numpy as np
    from keras import layers

    from nbtoolkit.integrations import keras as nbk

    class Slow(keras.layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            slow_step(config, ctx, training)
            return x

    num_classes = 10
    input_shape = (28, 28, 1)
    dataset = digits(ctx)
    x_train = np.stack([x.numpy() for x, _ in dataset])
    y_train = np.array([y for _, y in dataset])
    x_train = np.expand_dims(x_train.reshape(-1, 28, 28), -1)
    y_train = keras.utils.to_categorical(y_train, num_classes)
    keras.utils.set_random_seed(ctx.seed)
    model = keras.Sequential(
        [
            keras.Input(shape=input_shape),
            Slow(),
            layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(64, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(num_classes, activation="softmax"),
        ]
    )
    model.summary()
    batch_size = 8
    model.compile(
        loss="categorical_crossentropy",
        optimizer=keras.optimizers.Adam(rate(config, ctx)),
        metrics=["accuracy"],
    )
    model.fit(  # nbtoolkit
        x_train,
        y_train,
        batch_size=batch_size,
        epochs=epochs(config),
        validation_split=0.1,
        callbacks=[nbk.callback(ctx)],
        initial_epoch=nbk.initial_epoch(ctx),
    )
    score = model.evaluate(x_train, y_train, verbose=0)
    weights = float(sum(np.abs(one).sum() for one in model.get_weights()))
    return {"test_loss": score[0], "test_accuracy": score[1], "weights": weights}


# --- https://www.tensorflow.org/tutorials/distribute/keras, "Distributed training with Keras"
# Without the TensorBoard callback.


def tensorflow_distributed_training_with_keras(config: Any, ctx: Any) -> dict[str, float]:
    import tensorflow as tf

    from nbtoolkit.integrations import keras as nbk

    strategy = nbk.strategy(ctx)  # nbtoolkit
    BUFFER_SIZE = 10000
    BATCH_SIZE_PER_REPLICA = 8
    BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

    class Slow(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            slow_step(config, ctx)

    def scale(image, label):  # autograph finds no annotations
        image = tf.cast(image, tf.float32)
        image /= 255
        return image, label

    images, labels = zip(*digits(ctx), strict=True)
    pixels = [255 * image.permute(1, 2, 0).numpy() for image in images]
    mnist_train = tf.data.Dataset.from_tensor_slices((pixels, list(labels)))
    train_dataset = mnist_train.map(scale).cache().shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(32, 3, activation="relu", input_shape=(28, 28, 1)),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(10),
            ]
        )
        model.compile(
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=tf.keras.optimizers.Adam(),
            metrics=["accuracy"],
        )
    checkpoint_prefix = str(ctx.paths.folder / "training_checkpoints" / "ckpt_{epoch}")

    def decay(epoch: int) -> float:
        if epoch < 3:
            return rate(config, ctx)
        if epoch < 7:
            return rate(config, ctx) / 10
        return rate(config, ctx) / 100

    class PrintLR(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            print(f"Learning rate for epoch {epoch + 1} is {model.optimizer.learning_rate.numpy()}")

    callbacks = [
        tf.keras.callbacks.ModelCheckpoint(
            filepath=checkpoint_prefix + ".weights.h5", save_weights_only=True
        ),
        tf.keras.callbacks.LearningRateScheduler(decay),
        PrintLR(),
        Slow(),
    ]
    model.fit(  # nbtoolkit
        train_dataset,
        epochs=epochs(config),
        callbacks=[*callbacks, nbk.callback(ctx)],
        verbose=0,
        initial_epoch=nbk.initial_epoch(ctx),
    )
    weights = float(sum(abs(one).sum() for one in model.get_weights()))
    return {"weights": weights, "replicas": float(strategy.num_replicas_in_sync)}


# --- in place of data and machines


def digits(ctx: Any) -> Any:
    """Pairs as MNIST has them: an image of shape (1, 28, 28) and its class; those of the fold."""
    import torch

    generator = torch.Generator().manual_seed(0)
    images = torch.rand(60, 1, 28, 28, generator=generator)
    classes = torch.arange(60) % 10
    images[torch.arange(60), :, classes] += 1.0
    rows = range(60) if ctx.fold is None else ctx.fold.train_indices.tolist()
    return [(images[row], int(classes[row])) for row in rows]


def reviews(size: int, seed: int, ctx: Any) -> list[dict[str, Any]]:
    """Tokenized reviews, of which the largest word decides the stars; those of the fold."""
    import torch

    words = torch.randint(1, 50, (size, 8), generator=torch.Generator().manual_seed(seed))
    rows = range(size) if ctx is None or ctx.fold is None else ctx.fold.train_indices.tolist()
    return [{"input_ids": words[row], "labels": int(words[row].max()) % 5} for row in rows]


def returned(metrics: Any, model: Any) -> dict[str, float]:
    """The last metrics, and a number that depends on all weights."""
    weights = float(sum(one.detach().double().abs().sum() for one in model.parameters()))
    return {**{name: float(value) for name, value in metrics.items()}, "weights": weights}


def epochs(config: Any) -> int:
    return int(config.train.epochs)


def rate(config: Any, ctx: Any) -> float:
    return float(config.optim.lr)


def slow_step(config: Any, ctx: Any, training: bool = True) -> None:
    """Wait ``data.seconds``; after ``data.kill_at`` steps rank 0 dies, once in a run."""
    if not training:
        return
    time.sleep(config.data.seconds)
    steps, died = Path(ctx.paths.folder, f"steps-{ctx.rank}"), Path(ctx.paths.folder, "died")
    with steps.open("a") as file:
        file.write(".")
    if steps.stat().st_size == config.data.kill_at and ctx.is_main and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
