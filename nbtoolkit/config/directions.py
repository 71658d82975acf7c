"""Infer from a metric's name whether the highest or the lowest value is best."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

Direction = Literal["maximize", "minimize"]

_LOW = """
loss losses error errors err cost mae mse rmse msle rmsle mape smape mase medae mad perplexity
ppl nll bce ce crossentropy kl kld divergence deviance wer cer ter eer fid kid lpips brier ece
mce fpr fnr far frr risk regret distance latency seconds time logloss mlogloss merror nloglik l1 l2
"""
LOW = frozenset(_LOW.split())
"""Words in the names of metrics to minimize."""

_HIGH = """
accuracy acc auc auroc auprc aucpr rocauc map ap mar f1 f2 fbeta fscore precision recall
sensitivity specificity tpr tnr iou miou giou jaccard dice r2 kappa qwk mcc ndcg mrr bleu rouge
chrf meteor cider psnr ssim gini reward return returns likelihood elbo correlation pearson
spearman corr top similarity throughput coverage purity nmi ari
"""
HIGH = frozenset(_HIGH.split())
"""Words in the names of metrics to maximize."""

WEAK_HIGH = frozenset({"score", "scores", "variance"})
"""Words that mean maximize if no other word decides: ``final_score``, ``explained_variance``."""

_NEGATED = frozenset({"neg", "negative"})


def direction_of(metric: str) -> Direction | None:
    """Infer a metric's direction from its name.

    This is the rule behind ``study.direction: auto`` and ``checkpoint.mode: auto``. The name is
    split into words (``val_log_loss`` is val, log, loss), and the last known word decides:
    ``dice_loss`` is a loss. ``score`` decides only if no other word does: a ``brier_score`` is
    minimized. ``neg`` and ``negative`` reverse the direction, as in scikit-learn's
    ``neg_mean_squared_error``.

    Args:
        metric: a name such as ``"val_loss"``, ``"valRMSE"``, ``"test/acc@5"``.

    Returns:
        ``"minimize"``, ``"maximize"``, or None if the name has no known word.
    """
    words = _words(metric)
    known = [word for word in words if word in LOW or word in HIGH]
    if known:
        low = known[-1] in LOW
    elif WEAK_HIGH & set(words):
        low = False
    else:
        return None
    return "minimize" if low != bool(_NEGATED & set(words)) else "maximize"


def resolve(metric: str, config: Config) -> Direction | None:
    """Return a metric's direction: from the configuration, else from its name.

    Args:
        metric: the metric's name.
        config: its ``checkpoint.mode`` decides if ``checkpoint.monitor`` is this metric.

    Returns:
        None if neither decides.
    """
    checkpoint = config.checkpoint
    if checkpoint.monitor == metric and checkpoint.mode != "auto":
        return "minimize" if checkpoint.mode == "min" else "maximize"
    return direction_of(metric)


def _words(metric: str) -> list[str]:
    """Split a name into lower-case words: ``valRMSE`` is val, rmse; ``cross_entropy`` is one."""
    # Splits val|RMSE, Mean|Squared and FID|Score, but not IoU.
    border = r"(?<=[a-z])(?=[A-Z][A-Z]|[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])"
    apart = re.sub(border, "_", metric).lower()
    words = re.sub(r"cross[^a-z]?entropy", "crossentropy", apart)
    words = re.sub(r"per[^a-z]?sec(ond)?\b", "throughput", words)
    parts = re.findall(r"[a-z]+[0-9]*|[0-9]+", words)
    # top5 accuracy, rouge1, hits10: the number is no part of a known word, except in f1 and r2.
    return [part if part in LOW | HIGH else part.rstrip("0123456789") for part in parts]
