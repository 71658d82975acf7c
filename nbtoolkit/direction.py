"""Direction: whether the best value of a metric is its lowest or its highest.

The one rule for ``study.direction: auto`` and ``checkpoint.mode: auto``. It reads the metric's
name word by word (``val_log_loss`` is val, log, loss) and knows two lists of words. The last word
that is on one of them decides: ``dice_loss`` is a loss. ``score`` decides only where no other word
does: a ``brier_score`` is best where it is lowest. ``neg`` and ``negative`` turn it round, as in
scikit-learn's ``neg_mean_squared_error``. A name without any of these words cannot be judged.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nbtoolkit.config import Config

Direction = Literal["maximize", "minimize"]

_LOW = """
loss losses error errors err cost mae mse rmse msle rmsle mape smape mase medae mad perplexity
ppl nll bce ce crossentropy kl kld divergence deviance wer cer ter eer fid kid lpips brier ece
mce fpr fnr far frr risk regret distance latency seconds time
"""
LOW = frozenset(_LOW.split())
"""Words of metrics that are best where they are lowest."""

_HIGH = """
accuracy acc auc auroc auprc aucpr rocauc map ap mar f1 f2 fbeta fscore precision recall
sensitivity specificity tpr tnr iou miou giou jaccard dice r2 kappa qwk mcc ndcg mrr bleu rouge
chrf meteor cider psnr ssim gini reward return returns likelihood elbo correlation pearson
spearman corr top similarity throughput coverage purity nmi ari
"""
HIGH = frozenset(_HIGH.split())
"""Words of metrics that are best where they are highest."""

WEAK_HIGH = frozenset({"score", "scores", "variance"})
"""Highest where the name says nothing else: ``final_score``, ``explained_variance``."""

_TURNED = frozenset({"neg", "negative"})


def direction_of(metric: str) -> Direction | None:
    """Judge a metric by its name.

    Args:
        metric: a name such as ``"val_loss"``, ``"valRMSE"``, ``"test/acc@5"``.

    Returns:
        ``"minimize"``, ``"maximize"``, or None: the name says neither.
    """
    words = _words(metric)
    known = [word for word in words if word in LOW or word in HIGH]
    if known:
        low = known[-1] in LOW
    elif WEAK_HIGH & set(words):
        low = False
    else:
        return None
    return "minimize" if low != bool(_TURNED & set(words)) else "maximize"


def resolve(metric: str, config: Config) -> Direction | None:
    """Which values of a metric are best, as the configuration says or its name does.

    Args:
        metric: its name.
        config: ``checkpoint.mode`` says it where ``checkpoint.monitor`` is this metric.

    Returns:
        None: neither says it.
    """
    checkpoint = config.checkpoint
    if checkpoint.monitor == metric and checkpoint.mode != "auto":
        return "minimize" if checkpoint.mode == "min" else "maximize"
    return direction_of(metric)


def _words(metric: str) -> list[str]:
    """Lower-case words: ``valRMSE`` is val, rmse; ``cross_entropy`` is one word."""
    # val|RMSE, Mean|Squared, FID|Score; but IoU
    border = r"(?<=[a-z])(?=[A-Z][A-Z]|[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])"
    apart = re.sub(border, "_", metric).lower()
    words = re.sub(r"cross[^a-z]?entropy", "crossentropy", apart)
    words = re.sub(r"per[^a-z]?sec(ond)?\b", "throughput", words)
    found = re.findall(r"[a-z]+[0-9]*|[0-9]+", words)
    # top5 accuracy, rouge1, hits10: the number belongs to no known word, unless it does (f1, r2)
    return [word if word in LOW | HIGH else word.rstrip("0123456789") for word in found]
