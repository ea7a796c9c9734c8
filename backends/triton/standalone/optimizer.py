"""The printed optimizer class: its groups, its checkpoints, and the batches of its tensors."""

from __future__ import annotations

#: The class, for `filled`.
CLASS = '''
class <class>(torch.optim.Optimizer):
    """<summary>

    Parameters are <dtype>, contiguous, on a GPU.
    """

    <init>
        <checks>
        <defaults>
        <moves?>defaults["evaluating"] = False
        super().__init__(params, defaults)
        self.forget()

    <derived?>def add_param_group(self, param_group):
    <derived?>    super().add_param_group(param_group)
    <derived?>    group = self.param_groups[-1]
    <derived?>    self._derive(group)
    <derived?>
    <derived?>@staticmethod
    <derived?>def _derive(group):
    <derived?>    """Hyper-parameters of a group that follow from others, where they are None."""
        <derivations>
    <derived?>
    def __setstate__(self, state):
        super().__setstate__(state)
        self.forget()

    def forget(self):
        """Drops the tables of earlier steps."""
        self.fired, self.batches = None, []

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        <moves?>if any([group["evaluating"] for group in groups]):
        <moves?>    raise RuntimeError("parameters are where the model is evaluated: call train() before a step")
        params = [p for group in groups for p in group["params"] if p.grad is not None]
        places = [i for i, group in enumerate(groups) for p in group["params"] if p.grad is not None]
        fired = [*map(id, params)], places
        if fired != self.fired or any([batch.known_places != batch.places() for batch in self.batches]):
            self.fired, self.batches = None, self._batches(params)
            self.fired = fired
        pairs = [(batch, batch.gradients()) for batch in self.batches]
        <together?>together([batch.update(groups, grads) for batch, grads in pairs])
        <apart?>for batch, grads in pairs:
        <apart?>    batch.update(groups, grads)
        return loss

    def _batches(self, params):
        """The batches of some parameters. Before the first step of one, its states are made."""
        for p in params:
            self._check(p)
        groups = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        <shared?>latest = self._share()
        numbers = {p: number for number, p in enumerate(groups)}
        alike = {}
        for p in params:
            kind, state = self.kind_of(p), self.state[p]
            if not state:
                kind.first(state, p, self.param_groups[groups[p]])
            <shared?>for name, value in latest.get(groups[p], {}).items():
            <shared?>    state[name] = value.clone()
            if p.numel():
                <steps?>key = p.device, kind, groups[p], p.shape
                <plain?>key = p.device, kind
                alike.setdefault(key, []).append((p, state, groups[p], numbers[p]))
        <steps?>whole = {}
        <steps?>for (device, kind, group, _), tensors in alike.items():
        <steps?>    whole.setdefault((device, kind, group), []).extend(tensors)
        <steps?>return [key[1](tensors) for key, tensors in whole.items()]
        <plain?>return [kind(tensors) for (_, kind), tensors in alike.items()]

    <shared?>def _latest(self):
    <shared?>    """The numbers of each group after its last step, which tensors without a gradient then lack."""
    <shared?>    known = [(state, i) for batch in self.batches for state, i in zip(batch.states, batch.group.tolist())]
    <shared?>    if not known:
    <shared?>        every = [(self.state[p], i) for i, x in enumerate(self.param_groups) for p in x["params"]]
    <shared?>        known = sorted([x for x in every if x[0]], key=lambda x: float(x[0]["step"]))
    <shared?>    latest = {i: {name: torch.as_tensor(state[name]) for name in (<shared>)} for state, i in known}
    <model?>    for numbers in latest.values():  # of all groups, from a tensor of the last step
    <model?>        numbers |= {name: torch.as_tensor(known[-1][0][name]) for name in (<model>)}
    <model?>    for i in range(len(self.param_groups) if known else 0):
    <model?>        latest.setdefault(i, {name: torch.as_tensor(known[-1][0][name]) for name in (<model>)})
    <shared?>    return latest
    <shared?>
    <shared?>def _share(self):
    <shared?>    """Gives these numbers to the tensors that had no gradient in the last step, and returns them."""
    <shared?>    latest = self._latest()
    <shared?>    fired = {id(state) for batch in self.batches for state in batch.states}
    <shared?>    for i, group in enumerate(self.param_groups):
    <shared?>        for state in [self.state[p] for p in group["params"] if self.state.get(p)]:
    <shared?>            if id(state) not in fired:
    <shared?>                state |= {name: value.clone() for name, value in latest.get(i, {}).items()}
    <shared?>    return latest
    <shared?>
    <shared?>def __getstate__(self):
    <shared?>    self._share()
    <shared?>    return super().__getstate__()
    <shared?>
    <shared?>def state_dict(self):
    <shared?>    """The states as torch lays them out; every tensor has the numbers of its group."""
    <shared?>    self._share()
    <shared?>    return super().state_dict()
    <shared?>
    @staticmethod
    def kind_of(p):
        """The class of a parameter's batch."""
        <kinds>

    @staticmethod
    def _check(p):
        """TypeError or ValueError for a parameter that the kernels are not for."""
        if p.dtype != torch.<dtype> or p.layout != torch.strided or hasattr(p, "device_mesh"):
            raise TypeError("parameters must be <dtype>, dense, and whole on one device")
        if p.grad.dtype != p.dtype or p.grad.layout != p.layout:
            raise TypeError("gradients must be <dtype>, and dense")
        if not p.is_contiguous() or p.is_neg():
            raise ValueError("parameters must be contiguous, and no negative views")
        if p.device.type in ("cpu", "meta") and not INTERPRETED:
            where = "in main memory" if p.device.type == "cpu" else "on the meta device"
            raise ValueError(f"parameters must be on a GPU, and one is {where}: move the model there before")
        <applies>

    <moves?>@torch.no_grad()
    <moves?>def eval(self):
    <moves?>    """Moves parameters to where the model is to be evaluated."""
    <moves?>    self._move(<to>, True)
    <moves?>
    <moves?>@torch.no_grad()
    <moves?>def train(self):
    <moves?>    """Moves parameters back to where they are trained."""
    <moves?>    self._move(<back>, False)
    <moves?>
    <moves?>def _move(self, kind, evaluating):
    <moves?>    if all([group["evaluating"] == evaluating for group in self.param_groups]):
    <moves?>        return
    <moves?>    <shared?>self._share()
    <moves?>    alike = {}
    <moves?>    for i, group in enumerate(self.param_groups):
    <moves?>        for p in group["params"]:
    <moves?>            if self.state.get(p) and p.numel():
    <moves?>                alike.setdefault(p.device, []).append((p, self.state[p], i, 0))
    <moves?>    for tensors in alike.values():
    <moves?>        kind(tensors).update(self.param_groups)
    <moves?>    for group in self.param_groups:
    <moves?>        group["evaluating"] = evaluating
    <moves?>    self.forget()
    <moves?>
    def load_state_dict(self, state_dict):
        """Loads what this class saved<foreign>.

        ValueError for anything else, before anything changes.
        """
        state_dict = self._read(state_dict)
        super().load_state_dict(state_dict)
        <others?># States keep their own dtypes, which torch would make the parameter's.
        <others?>for p, saved in self._saved(state_dict):
        <others?>    for name, dtype in {<others>}.items():
        <others?>        if name in saved:
        <others?>            self.state[p][name] = torch.as_tensor(saved[name]).to(p.device, dtype, copy=True)

    def _saved(self, state_dict):
        """Each parameter, and the states that were saved for it."""
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        return [(p, state_dict["state"][k]) for k, p in zip(places, params) if state_dict["state"].get(k)]

    def _read(self, state_dict):
        """A checkpoint with the names of this class; ValueError for another class's."""
        <reads?>theirs = {<keys>}
        <reads?>if any([theirs & group.keys() for group in state_dict["param_groups"]]):
        <reads?>    state_dict = self._renamed(state_dict)
        for name in self.defaults:
            if any(name not in group for group in state_dict["param_groups"]):
                raise ValueError(f"a saved group has no {name}: load what this class saved")
        for p, saved in self._saved(state_dict):
            for name, size in self.kind_of(p).counts(p).items():
                if name not in saved:
                    raise ValueError(f"saved states are {', '.join(saved)}, without {name}: load what this class saved")
                count = torch.as_tensor(saved[name]).numel()
                if count != size:
                    raise ValueError(f"{name} has {count} saved numbers for {size} here: load what this class saved")
        return state_dict
    <reads?>
    <reads?>def _renamed(self, state_dict):
    <reads?>    """What <theirs> saved, with the names of this class; ValueError where it means another rule."""
    <reads?>    groups, only = [], {
        <when>
    <reads?>    }
    <reads?>    for saved in state_dict["param_groups"]:
    <reads?>        for name, values in only.items():
    <reads?>            if name in saved and saved[name] not in values:
    <reads?>                one = f"<theirs> saved {name}={saved[name]}"
    <reads?>                raise ValueError(f"{one}, and this class has {name}={values[0]} alone")
    <reads?>        group = {**self.defaults, "params": saved["params"]}
    <reads?>        group |= {key: saved[key] for key in ["initial_lr"] if key in saved}  # a scheduler's
    <reads?>        places = {
            <places>
    <reads?>        }
    <reads?>        for name, (key, place) in places.items():
    <reads?>            value = saved.get(key)
    <reads?>            value = value[place] if isinstance(value, (tuple, list)) else value
    <reads?>            group[name] = group[name] if value is None else float(value)
    <derives?>        self._derive(group)
    <reads?>        groups.append(group)
    <reads?>    names = {<names>}
    <reads?>    states = {
    <reads?>        key: {names.get(name, name): value for name, value in state.items()}<absent>
    <reads?>        for key, state in state_dict["state"].items()
    <reads?>    }
    <reads?>    return {"state": states, "param_groups": groups}
'''
