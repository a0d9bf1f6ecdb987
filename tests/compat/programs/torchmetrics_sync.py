"""torchmetrics: metrics whose states are sums, lists of uneven lengths, and matrices, over two ranks."""

import torch
import torch.distributed as dist
from torchmetrics import MetricCollection
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

from tests.compat.programs.result import report

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
classification = MetricCollection(
    [MulticlassAccuracy(3), MulticlassAUROC(3), MulticlassConfusionMatrix(3)], compute_groups=False
)
aggregation = [MeanMetric(), MaxMetric(), CatMetric()]
for _ in range(3):
    scores, labels = torch.rand(10 + 5 * rank, 3).softmax(1), torch.randint(0, 3, (10 + 5 * rank,))
    classification.update(scores, labels)
    for metric in aggregation:
        metric.update(scores[:, 0])
found = [*classification.compute().values(), *(metric.compute() for metric in aggregation)]
assert len(found[-1]) == 3 * (10 + 15), len(found[-1])
assert int(found[2].sum()) == 3 * (10 + 15)
report([x for value in found for x in value.flatten()])
dist.destroy_process_group()
