"""Learn to balance a pole, with actors that join and leave: reinforcement learning over remote calls.

One command starts all processes::

    python examples/actor_learner.py

This process is the learner. It starts three actors, which join its group and play when it calls them. In each update it has
all current actors play a round with the newest policy, and learns from the results (policy gradient with a learned baseline).
During the training one actor leaves, one is killed, and a new one joins; the learner continues with the remaining ones. It
stops when a pole stays up for --reward of 200 steps on average.
"""

import argparse
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Self

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributions import Categorical

from rallypoint import rpc


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Learn to balance a pole, with actors that come and go.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--reward", type=float, default=195.0, help="steps, of 200, to learn")
    parser.add_argument("--updates", type=int, default=120, help="give up after so many")
    parser.add_argument("--episodes", type=int, default=16, help="per round of an actor")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="Adam's step size")
    parser.add_argument("--seed", type=int, default=0, help="seed for the policy and the episodes")
    return parser.parse_args()


# -- the task -------------------------------------------------------------------------------------


class Poles:
    """Poles on carts that are pushed left or right, by the equations of Barto, Sutton and Anderson (1983).

    A state is the position and speed of the cart, and the angle and angular speed of the pole, in metres and radians.
    """

    STEPS = 200
    SECONDS = 0.02  # per step
    GRAVITY, FORCE = 9.8, 10.0
    CART, POLE, HALF_LENGTH = 1.0, 0.1, 0.5  # kilograms, and metres
    FARTHEST, STEEPEST = 2.4, math.radians(12)

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.states = (torch.rand(count, 4, generator=generator) - 0.5) * 0.1  # [count, 4]

    def push(self, right: Tensor) -> Tensor:
        """Push each cart left or right; return which poles are still up."""
        _, speed, angle, turning = self.states.unbind(1)
        mass, moment = self.CART + self.POLE, self.POLE * self.HALF_LENGTH
        sin, cos = angle.sin(), angle.cos()
        push = (self.FORCE * (2 * right - 1) + moment * turning**2 * sin) / mass
        angular = (self.GRAVITY * sin - cos * push) / (
            self.HALF_LENGTH * (4 / 3 - self.POLE * cos**2 / mass)
        )
        linear = push - moment * angular * cos / mass
        rates = torch.stack([speed, linear, turning, angular], 1)
        self.states = self.states + self.SECONDS * rates
        return (self.states[:, 0].abs() < self.FARTHEST) & (self.states[:, 2].abs() < self.STEEPEST)


class Policy(nn.Module):
    """Logits of the two pushes, and the expected number of remaining steps (as a fraction of all)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.pushes = nn.Linear(32, 2)
        self.value = nn.Linear(32, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(states)
        return self.pushes(hidden), self.value(hidden).squeeze(-1)


# -- an actor -------------------------------------------------------------------------------------


@torch.no_grad()
def play(weights: dict[str, Tensor], episodes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Play a round with this policy. Runs on an actor, when the learner calls it.

    Returns:
        ``[STEPS, episodes, 4]`` states; ``[STEPS, episodes]`` pushes; whether each episode was still running.
    """
    policy = Policy()
    policy.load_state_dict(weights)
    generator = torch.Generator().manual_seed(seed)
    poles = Poles(episodes, generator)
    on = torch.ones(episodes, dtype=torch.bool)
    states, pushes, alive = [], [], []
    for _ in range(Poles.STEPS):
        right = policy(poles.states)[0].softmax(-1)[:, 1]
        push = (torch.rand(episodes, generator=generator) < right).long()
        states.append(poles.states)
        pushes.append(push)
        alive.append(on)
        on = on & poles.push(push)
    return torch.stack(states), torch.stack(pushes), torch.stack(alive)


_dismissed = threading.Event()


def dismiss() -> None:
    """Make this actor leave. Runs on an actor."""
    _dismissed.set()


def act(name: str, port: int) -> None:
    """Run an actor: join, play when called, leave."""
    torch.set_num_threads(1)
    rpc.init_rpc(name, rpc_backend_options=meet_at(port))
    # If the learner exits, so do the actors.
    rpc.on_leave(lambda worker, _: dismiss() if worker.name == "learner" else None)
    _dismissed.wait()
    rpc.shutdown()  # a running round is played to its end


def meet_at(port: int) -> rpc.NativeRpcBackendOptions:
    return rpc.NativeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")


# -- the learner ----------------------------------------------------------------------------------


class Cast:
    """The processes of the actors, and what happens to them."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.processes: dict[str, BaseProcess] = {}
        # Actors are forks of a server that has imported everything once.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "rich.progress", "rallypoint.rpc"])

    def start(self, name: str) -> None:
        process = self.context.Process(target=act, args=(name, self.port), daemon=True)
        process.start()
        self.processes[name] = process

    def kill(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGKILL)

    def join(self) -> None:
        for process in self.processes.values():
            process.join(10)


class ProgressReport:
    """A progress bar on a terminal, occasional lines in a log, and notes about joins and leaves."""

    def __init__(self, wanted: float) -> None:
        self.wanted = wanted
        self.lines = not sys.stderr.isatty()
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps up"),
            TimeElapsedColumn(),
            console=self.console,
            disable=self.lines,
        )
        self.task = self.bar.add_task("learning", total=wanted)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text)

    def update(self, number: int, reward: float, num_actors: int) -> None:
        text = f"update {number}  {num_actors} actors"
        self.bar.update(self.task, description=text, completed=reward)
        if self.lines and number % 10 == 0:
            self.say(f"{text}  reward {reward:.1f}")


def play_all(
    weights: dict[str, Tensor], episodes: int, seed: int, progress: ProgressReport
) -> list[tuple[Tensor, ...]]:
    """A round from every current actor. Actors lost meanwhile contribute nothing."""
    _, present = rpc.members()
    calls, rounds = [], []
    for worker in present:
        if worker.name != "learner":
            with or_lost(worker, progress):
                arguments = (weights, episodes, seed * 1000 + worker.id)
                calls.append((worker, rpc.rpc_async(worker, play, arguments)))
    for worker, call in calls:
        with or_lost(worker, progress):
            rounds.append(call.wait())
    return rounds


@contextmanager
def or_lost(worker: rpc.WorkerInfo, progress: ProgressReport) -> Iterator[None]:
    """An actor may leave at any time: between two lines, and while it plays."""
    try:
        yield
    except rpc.RpcError as error:
        progress.say(f"the round of {worker.name} is lost: {error}")


def learn(
    policy: Policy, optimizer: torch.optim.Optimizer, rounds: list[tuple[Tensor, ...]]
) -> float:
    """Take a step of the policy gradient; return the mean number of steps that a pole stayed up."""
    states, pushes, on = (torch.cat(each, dim=1) for each in zip(*rounds, strict=True))
    # Each step counts one, so the return is the number of remaining steps.
    to_come = on.flip(0).cumsum(0).flip(0) / Poles.STEPS
    logits, expected = policy(states)
    chosen = Categorical(logits=logits)
    surprise = (to_come - expected)[on]
    advantage = surprise.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    loss = (
        -(chosen.log_prob(pushes)[on] * advantage).mean()
        + surprise.square().mean()
        - 0.01 * chosen.entropy()[on].mean()
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return on.sum(0).double().mean().item()


def train(arguments: argparse.Namespace, cast: Cast, progress: ProgressReport) -> None:
    torch.manual_seed(arguments.seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=arguments.learning_rate)
    happenings = {
        10: lambda: rpc.rpc_sync("actor-0", dismiss),
        15: lambda: cast.kill("actor-1"),
        20: lambda: cast.start("actor-3"),
    }
    recent: deque[float] = deque(maxlen=5)
    for update in range(1, arguments.updates + 1):
        happenings.get(update, lambda: None)()
        rounds = play_all(policy.state_dict(), arguments.episodes, update, progress)
        if not rounds:
            sys.exit("no actor is left")
        recent.append(learn(policy, optimizer, rounds))
        reward = sum(recent) / len(recent)
        progress.update(update, reward, len(rounds))
        if len(recent) == recent.maxlen and reward >= arguments.reward:
            break
    print(f"reward {reward:.1f} of {Poles.STEPS} after {update} updates", flush=True)
    if reward < arguments.reward:
        sys.exit(f"{reward:.1f} is below --reward {arguments.reward:.1f}")


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    # Port 0 means any free port. Actors find the learner at this store, whenever they start.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cast = Cast(store.port)
    for number in range(3):
        cast.start(f"actor-{number}")
    rpc.init_rpc("learner", rpc_backend_options=meet_at(store.port))
    try:
        with ProgressReport(arguments.reward) as progress:
            first = rpc.wait_for([f"actor-{number}" for number in range(3)], timeout=60)
            progress.say(f"{', '.join(worker.name for worker in first)} are here")
            rpc.on_join(lambda worker: progress.say(f"{worker.name} has joined"))
            rpc.on_leave(lambda worker, why: progress.say(f"{worker.name} has gone: {why}"))
            train(arguments, cast, progress)
    finally:
        rpc.shutdown()
        cast.join()


if __name__ == "__main__":
    main()
