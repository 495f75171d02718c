"""The ServerApp: as with FedAvg, and another strategy."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from digits_app.task import load, make_model
from regtopk.integrations.flower.app import SparseFedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = SparseFedAvg(
        fraction_train=config["fraction-train"],
        min_available_nodes=config["min-nodes"],
        fraction_evaluate=0.0,
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = make_model()
        model.load_state_dict(arrays.to_torch_state_dict())
        images, labels = load()
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        found = {
            "round": server_round,
            "accuracy": accuracy,
            "sent-bytes": strategy.sent_bytes,
            "received-bytes": strategy.received_bytes,
            "refused": strategy.num_refused,
        }
        if config["log"]:
            with Path(config["log"]).open("a") as log:
                print(json.dumps(found), file=log)
        return MetricRecord(found)

    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=config["num-rounds"],
        evaluate_fn=evaluate,
    )
