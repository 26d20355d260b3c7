"""A whole GRPO trainer on Turngate's API in plain torch and peft: lease, step, publish, acknowledge. Change it freely.

    turngate proxy --engine http://127.0.0.1:8000 --store runs/try/store &      # and a runner that makes groups
    python examples/minimal_trainer.py --model <folder> --key-file runs/try/store/admin.key --steps 10

No packing, no FSDP, no optimizer state in its checkpoints: `turngate train` has those.
"""

import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from turngate.proxy import wire
from turngate.proxy.client import GatewayClient


def samples(group: wire.LeasedGroup) -> list[tuple[wire.WireRow, float]]:
    """Every row of a group with its rollout's advantage; none where all scored rewards are equal."""
    scored = [rollout for rollout in group.rollouts if rollout.outcome == "scored"]
    rewards = torch.tensor([rollout.reward for rollout in scored])
    if len(scored) < 2 or rewards.std() == 0:
        return []
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return [(row, float(a)) for rollout, a in zip(scored, advantages, strict=True) for row in rollout.rows]


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: list, clip: float = 0.2) -> float:
    """One optimizer step: a clipped importance ratio against the recorded log-probs, mean over all its tokens."""
    rows = [(row.unpack(), advantage) for row, advantage in batch]
    tokens, total = max(sum(int(row.mask.sum()) for row, _ in rows), 1), 0.0
    for row, advantage in rows:
        ids, mask = torch.tensor(row.ids[None], dtype=torch.long), torch.tensor(row.mask[1:])
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)  # of what comes after each token
        new = logprobs.gather(-1, ids[0, 1:, None])[:, 0][mask]
        ratio = (new - torch.tensor(row.logprobs[1:])[mask]).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        loss = -gain.sum() / tokens
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def main() -> None:
    """Train `--steps` steps."""
    p = ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--key-file", required=True, type=Path)
    options = {"gateway": "http://127.0.0.1:8400", "policy": "policy", "out": "adapters"}
    for name, default in {**options, "steps": 10, "groups": 4, "lr": 1e-4}.items():
        p.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    a = p.parse_args()
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32), lora)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=a.lr)
    with GatewayClient(a.gateway, a.key_file.read_text().strip()) as gateway:
        gateway.resume(wire.Resume(policy=a.policy, step=0))  # what a trainer before us leased or trained is free again
        for step in range(1, a.steps + 1):
            fates, batch, wanted = [], [], wire.NewLease(policy=a.policy, max_groups=a.groups, ttl_s=3600)
            while not (lease := gateway.lease(wanted)).groups:
                time.sleep(1)
            for group in lease.groups:
                batch += (some := samples(group))
                fates.append(wire.GroupAck(group=group.id, fate="trained" if some else "zero_variance"))
            loss, folder = train_step(model, optimizer, batch), Path(a.out, f"step-{step}").resolve()
            model.save_pretrained(folder)
            gateway.ack(lease.lease, wire.AckLease(epoch=lease.epoch, step=step, groups=fates))
            gateway.durable(wire.DurableStep(policy=a.policy, step=step, path=str(folder)))
            live = gateway.publish_adapter(wire.PublishAdapter(policy=a.policy, path=str(folder), step=step))
            print(f"step {step}: loss {loss:.4f}, {len(batch)} rows, version {live.version} is live", flush=True)


if __name__ == "__main__":
    main()
