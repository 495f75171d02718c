"""The ClientApp: as with FedAvg, and one mod."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import digits_of, make_model, train
from regtopk import TopK
from regtopk.integrations.flower.app import SparseMod

app = ClientApp(mods=[SparseMod(TopK(density=0.01, value_code="4bit"))])


@app.train()
def train_on_own_digits(message: Message, context: Context) -> Message:
    config = context.node_config
    images, labels = digits_of(int(config["partition-id"]), int(config["num-partitions"]))
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, images, labels, seed=message.content["config"]["server-round"])
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
