"""torchrec: training of an embedding bag collection in shards: by table, by column, and replicated."""

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingType

from tests.compat.programs.result import report

dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=f"t{i}", embedding_dim=8, num_embeddings=40, feature_names=[f"f{i}"])
                for i in range(3)
            ],
        )
        self.over = torch.nn.Linear(24, 1)

    def forward(self, features):
        return self.over(self.tables(features).values())


torch.manual_seed(1)
kinds = [ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL]
planner = EmbeddingShardingPlanner(
    topology=Topology(world_size=2, compute_device="cpu"),
    constraints={
        f"t{i}": ParameterConstraints(sharding_types=[kind.value], min_partition=4)
        for i, kind in enumerate(kinds)
    },
)
sharders = [EmbeddingBagCollectionSharder()]
model = Model()
plan = planner.collective_plan(model, sharders, dist.group.WORLD)
model = DistributedModelParallel(
    model, env=ShardingEnv.from_process_group(dist.group.WORLD), device=device, plan=plan, sharders=sharders
)
with torch.no_grad():
    for _, weights in sorted(model.named_parameters()):
        weights.fill_(0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(4):
    torch.manual_seed(100 + 10 * step + rank)
    lengths = torch.randint(0, 4, (3 * 8,))
    features = KeyedJaggedTensor(
        ["f0", "f1", "f2"], torch.randint(0, 40, (int(lengths.sum()),)), lengths=lengths
    )
    loss = (model(features) - torch.randn(8, 1)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total)
report(losses)
dist.destroy_process_group()
