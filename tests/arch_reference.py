"""A decoder as its `BlockSpec` says, in fp32 and in the plainest torch: the specification that the native core meets.

Reads the converted model directory alone, so it also shows that the canonical tensors are the right ones.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import gelu, layer_norm, relu, silu

from flashllm.arch.registry import resident_shapes
from flashllm.arch.spec import BlockSpec
from flashllm.arch.tensors import TOKEN_TABLE
from flashllm.format.model_dir import ModelDir, read_plane
from flashllm.format.model_files import FFN, RESIDENT, TABLE, ffn_tensor, gate_tensor
from flashllm.format.rows import widened_rows
from flashllm.format.safetensors import open_safetensors

ACTIVATIONS = {
    "relu": relu,
    "squared_relu": lambda h: relu(h).square(),
    "drelu": relu,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda h: gelu(h, approximate="tanh"),
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "clamped_swiglu": lambda h: h.clamp(max=7.0) * torch.sigmoid(1.702 * h.clamp(max=7.0)),
}
OF_UP = {"drelu": relu, "clamped_swiglu": lambda h: h.clamp(-7.0, 7.0) + 1.0}  # of the up products


class ReferenceDecoder:
    """The model in a directory, all of it in memory."""

    # Tests set these, to see that it shows. None: as the spec says.
    norm_groups: int | None = None  # of what state spaces mix
    delta_scale: float | None = None  # of a delta rule's queries
    delta_gate: Callable[[torch.Tensor], torch.Tensor] | None = None  # of a delta rule's output
    left_out = -torch.inf  # the score of experts whose group does not count

    def __init__(self, path: Path, *, cuts: bool = True) -> None:
        self.model = ModelDir.open(path)
        if not cuts:
            self.model = self.model.with_sparsity(None)
        self.block: BlockSpec = self.model.block
        self.tensors = self._read(path / RESIDENT)
        self.ffn, self.kept = [], {}
        with open_safetensors(path / FFN) as file:
            for layer, layout in enumerate(self.model.manifest.layouts):
                if not layout.d_ff:
                    self.ffn.append({})
                    continue
                rows = np.empty((layout.num_rows, layout.stride), np.uint8)
                file.read_into(file.header.tensors[ffn_tensor(layer)], 0, rows.reshape(-1).data)
                parts = widened_rows(layout, rows[: layout.d_ff], read_plane(path, self.model.manifest, layer))
                self.ffn.append({name: torch.from_numpy(np.array(part)) for name, part in parts.items()})
                if self.model.manifest.resident_gate:
                    self.ffn[-1]["gate"] = self.tensors[gate_tensor(layer)]

    def _read(self, path):
        tensors, manifest = {}, self.model.manifest
        shapes = resident_shapes(self.model.config)
        width = {gate_tensor(layer): manifest.rows.d_model for layer in range(self.model.architecture.num_layers)}
        width |= {name: shape[-1] for name, shape in shapes.items()}
        with open_safetensors(path) as file:
            for name, info in file.header.tensors.items():
                if not name.startswith("flashllm.") and name not in manifest.planes:
                    encoding = manifest.encoding_of(name)
                    values = np.empty(info.shape, encoding.storage)
                    file.read_into(info, 0, values.reshape(-1).view(np.uint8).data)
                    tensors[name] = torch.from_numpy(np.array(encoding.widened(values, width[name])))
        return tensors

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[tokens, vocab] of one sequence."""
        block, tensors = self.block, self.tensors
        positions = torch.arange(len(ids))
        h = tensors["embedding.weight"][ids] * block.embedding_scale
        if "project_in.weight" in tensors:
            h = self._linear("project_in", h)
        if block.embedding_norm:
            h = self._norm("embedding_norm", h)
        if block.learned_positions:
            h = h + tensors["positions.weight"][positions + block.position_offset]
        rows = self._token_rows(ids, h)
        streams = [h, *(self._as_long(f"streams.{s}.enter", h, h) for s in range(block.streams - 1))]
        for layer in range(len(self.ffn)):
            self.of_layer = None if rows is None else rows[:, layer]
            if block.streams:
                streams = self._streams(layer, streams, positions)
            else:
                h = self._layer(layer, h, positions)
        if block.streams:
            first = streams[0]
            others = [self._as_long(f"streams.{s}.leave", states, first) for s, states in enumerate(streams[1:])]
            h = torch.stack([first, *others]).mean(0)
        if block.final_norm:
            h = self._norm("final_norm", h)
        if "project_out.weight" in tensors:
            h = self._linear("project_out", h)
        logits = h @ tensors["embedding.weight" if block.tied_head else "head.weight"].T * block.logit_scale
        logits = logits + tensors.get("head.bias", 0.0)
        return self._capped(logits, block.logit_softcap)

    def _as_long(self, name, x, like):
        made = self._linear(name, x)
        return made * (like.square().mean(-1, keepdim=True) / made.square().mean(-1, keepdim=True)).sqrt()

    def _streams(self, layer, streams, positions):
        """Alternating updates around a layer."""
        at, count = f"layers.{layer}.", self.block.streams

        def routed(x):
            return torch.tanh(
                self._linear(at + "stream_router", self._norm(at + "stream_router_norm", x) / x.shape[-1])
            )

        factors = (routed(streams[0]) @ self.tensors[at + "stream_predict"].T).view(-1, count, count)
        guessed = [
            states + sum(factors[:, to, i, None] * streams[i] for i in range(count))
            for to, states in enumerate(streams)
        ]
        row, self.of_layer = self.of_layer, None
        made = self._layer(layer, guessed[0], positions)
        factors = routed(made) @ self.tensors[at + "stream_correct"].T + 1
        right = [states + (made - guessed[0]) * factors[:, s, None] for s, states in enumerate(guessed)]
        gate = self._linear(at + "per_layer_gate", right[0] * self.tensors[at + "stream_scale"])
        gate = self._linear(at + "per_layer_out", self._activation(layer, gate) * row)
        added = self._norm(at + "per_layer_norm", gate)
        return [right[0], *(states + added for states in right[1:])]

    def _token_rows(self, ids, h):
        """[tokens, layers, dim] of per-layer embeddings."""
        per_layer, table = self.block.per_layer, self.model.table
        if per_layer is None:
            return None
        with open_safetensors(self.model.path / TABLE) as file:
            stored = np.empty((table.rows, table.stride), np.uint8)
            file.read_into(file.header.tensors[TOKEN_TABLE], 0, stored.reshape(-1).data)
        known = np.array([token if token < table.rows else 0 for token in ids])
        stored = np.ascontiguousarray(stored[known, : table.row_nbytes]).view(table.encoding.storage)
        rows = torch.from_numpy(np.array(table.encoding.widened(stored, table.columns)))
        made = self._linear("per_layer_projection", h) * self.block.d_model**-0.5
        made = self._norm("per_layer_projection_norm", made.view(len(ids), -1, per_layer.dim))
        return (made + rows.view(made.shape) * per_layer.dim**0.5) * 0.5**0.5

    def _layer(self, layer, h, positions):
        block, spec, at = self.block, self.block.layers[layer], f"layers.{layer}."

        def before(name, states):
            return self._rounded(self._norm(at + name, states) if spec.norms in ("input", "both") else states)

        def behind(name, states):
            states = self._norm(at + name, states) if spec.norms in ("output", "both") else states
            return states * block.residual_scale

        def attention(states):
            x = before("attention_norm", states)
            kind = spec.mixer.kind
            if kind == "attention":
                made = self._attention(layer, x, positions)
            else:
                computed = {"delta_rule": self._delta, "state_space": self._space, "short_convolution": self._short}
                made = computed[kind](layer, x)
            made = made if spec.second is None else made + self._space(layer, x)
            return behind("attention_output_norm", made)

        def ffn(states):
            read = before("attention_norm" if spec.shared_norm else "ffn_norm", states)
            made = self._ffn(layer, read, states)
            if spec.beside:
                inputs = self._norm(at + "ffn_beside_norm", states) if spec.beside_norms else read
                dense = self._linear(at + "beside_up", inputs)
                gate = self._linear(at + "beside_gate", inputs) if block.gated else None
                dense = self._activation(layer, dense) if gate is None else self._activation(layer, gate) * dense
                dense = self._linear(at + "beside_down", dense)
                if spec.beside_norms:
                    dense = self._norm(at + "ffn_beside_output_norm", dense)
                    made = self._norm(at + "ffn_experts_output_norm", made)
                if at + "shared_gate.weight" in self.tensors:
                    dense = dense * self._linear(at + "shared_gate", inputs).sigmoid()
                made = made + dense
            return behind("ffn_output_norm", made * spec.ffn_scale)

        if spec.parallel:
            return h + attention(h) + ffn(h)
        for name, part in (("attention_norm", attention), ("ffn_norm", ffn)):
            if (spec.mixer is None) if part is attention else not spec.neurons:
                continue
            inputs, h = h, h + part(h)
            if block.laurel and part is attention:
                x = before(name, inputs)
                low = self._linear(at + "laurel_out", self._linear(at + "laurel_in", x))
                h = (h + x + self._norm(at + "laurel_norm", low)) / 2**0.5
            h = self._norm(at + name, h) if spec.norms == "sum" else h
        if self.of_layer is not None:
            gate = self._activation(layer, self._linear(at + "per_layer_gate", h))
            h = h + self._norm(at + "per_layer_norm", self._linear(at + "per_layer_out", gate * self.of_layer))
        return h * self.tensors.get(at + "scale", 1.0)

    @staticmethod
    def _capped(values, cap):
        return values if cap is None else cap * torch.tanh(values / cap)

    def _linear(self, name, x):
        bias = self.tensors.get(name + ".bias")
        return torch.nn.functional.linear(x, self.tensors[name + ".weight"], bias)

    def _norm(self, name, x):
        weight, bias = (self.tensors.get(f"{name}.{part}") for part in ("weight", "bias"))
        shift, epsilon = self.block.norm_shift, self.block.norm_epsilon
        weight = torch.ones(()) if weight is None else weight + shift
        if self.block.norm == "layer":
            x = layer_norm(x, x.shape[-1:], eps=epsilon)
        else:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        return x * weight + (0.0 if bias is None else bias)

    def _heads(self, layer, part, x, heads):
        """[tokens, heads, head_dim] of a projection, with its norm."""
        mixer, name = self.block.layers[layer].mixer, f"layers.{layer}.{part}"
        made = self._linear(name, x)
        if part != "value" and mixer.query_key_norm == "projection":
            made = self._norm(name + "_norm", made)
        made = made.view(len(x), heads, mixer.value_width if part == "value" else mixer.head_dim)
        return (
            self._norm(name + "_norm", made) if part != "value" and mixer.query_key_norm in ("head", "heads") else made
        )

    def _keys_and_values(self, layer, x, positions):
        """[tokens, kv_heads, head_dim] each, kept for the layers that share them."""
        mixer = self.block.layers[layer].mixer
        if mixer.shared is not None:
            return self.kept[mixer.shared]
        key = self._heads(layer, "key", x, mixer.kv_heads)
        if mixer.key_is_value:
            value = self._linear(f"layers.{layer}.key", x).view(key.shape)
        else:
            value = self._heads(layer, "value", x, mixer.kv_heads)
        if mixer.value_norm:
            value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + self.block.norm_epsilon)
        key = self._rotate(key, positions, mixer.rotary)
        if mixer.query_key_norm == "turned_head":
            key = self._norm(f"layers.{layer}.key_norm", key)
        self.kept[layer] = key, value
        return self.kept[layer]

    def _latent(self, layer, x, positions):
        """Query, key and value of every head, expanded."""
        mixer, at, tensors = self.block.layers[layer].mixer, f"layers.{layer}.", self.tensors
        rank, plain = mixer.latent.rank, mixer.latent.plain_dim

        def norm(name, states):
            states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + mixer.latent.norm_epsilon)
            return states * tensors[f"{at}{name}.weight"]

        row = self._linear(at + "key", x)
        low = x if mixer.latent.query_rank is None else norm("query_norm", self._linear(at + "query_down", x))
        query = self._linear(at + "query", low).view(len(x), mixer.heads, -1)
        row, turned = norm("key_norm", row[:, :rank]), row[:, None, rank:]
        query_turned, turned = (self._rotate(part, positions, mixer.rotary) for part in (query[..., plain:], turned))
        key = torch.einsum("tc,hcn->thn", row, tensors[at + "key_up.weight"].view(mixer.heads, rank, -1))
        value = torch.einsum("tc,hvc->thv", row, tensors[at + "value.weight"].view(mixer.heads, -1, rank))
        key = torch.cat((key, turned.expand(-1, mixer.heads, -1)), -1)
        return torch.cat((query[..., :plain], query_turned), -1), key, value

    def _attention(self, layer, x, positions):
        mixer = self.block.layers[layer].mixer
        if mixer.latent is not None:
            query, key, value = self._latent(layer, x, positions)
        else:
            query = self._heads(layer, "query", x, mixer.heads)
            query = self._rotate(query, positions, mixer.rotary)
            if mixer.query_key_norm == "turned_head":
                query = self._norm(f"layers.{layer}.query_norm", query)
            made = self._keys_and_values(layer, x, positions)
            key, value = (states.repeat_interleave(mixer.heads // mixer.kv_heads, 1) for states in made)
            value = value * mixer.value_scale
        query = query * mixer.query_scale
        if mixer.growth is not None:
            steps = torch.div(positions, mixer.growth.step, rounding_mode="floor")
            query = query * (1 + mixer.growth.rate * torch.log1p(steps.float()))[:, None, None]
        scores = self._capped(torch.einsum("qhd,khd->hqk", query, key), mixer.softcap)
        scores = scores + self._alibi(mixer.alibi, positions)
        distance = positions[None, :, None] - positions[None, None, :]
        window = mixer.window or len(x)
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        sinks = self.tensors.get(f"layers.{layer}.sinks")
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(x), 1)), -1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(x)], value)
        mixed = mixed.reshape(len(x), -1)
        if mixer.gate != "none":
            gate = self._linear(f"layers.{layer}.out_gate", x)
            gate = torch.sigmoid(gate) if mixer.gate == "sigmoid" else torch.nn.functional.softplus(gate)
            mixed = mixed * gate.repeat_interleave(mixed.shape[1] // gate.shape[1], 1)
        if self.block.sub_norms:
            mixed = self._norm(f"layers.{layer}.attention_sub_norm", mixed)
        return self._linear(f"layers.{layer}.out", self._rounded(mixed)) * mixer.out_scale

    def _convolved(self, at, mixer, inputs):
        """Along the tokens, each channel by itself."""
        padded = torch.cat((torch.zeros(mixer.kernel - 1, mixer.channels), torch.cat(inputs, -1)))
        parts = [at + f"conv_{part}.weight" for part in ("query", "key", "value")]
        apart = parts[0] in self.tensors
        taps = torch.cat([self.tensors[name] for name in parts]) if apart else self.tensors[at + "conv.weight"]
        taps = taps[:, 0]
        sums = sum(padded[j : j + len(inputs[0])] * taps[:, j] for j in range(mixer.kernel))
        return sums + self.tensors.get(at + "conv.bias", 0.0)

    def _short(self, layer, x):
        mixer, at = self.block.layers[layer].mixer, f"layers.{layer}.state."
        query, key, value = (self._linear(at + part, x) for part in ("query", "key", "value"))
        return self._linear(at + "out", query * self._convolved(at, mixer, [key * value]))

    def _delta(self, layer, x):
        mixer, at = self.block.layers[layer].mixer, f"layers.{layer}."
        convolved = [self._linear(at + part, x) for part in ("query", "key", "value")]
        convolved = silu(self._convolved(at, mixer, convolved))
        keys = mixer.rows["query"]
        query, key, value = convolved.split((keys, keys, mixer.mixed_dim), -1)
        owner = torch.arange(mixer.value_heads)
        owner = owner % mixer.key_heads if mixer.tiled else owner // (mixer.value_heads // mixer.key_heads)
        query, key = (each.view(len(x), mixer.key_heads, -1)[:, owner] for each in (query, key))
        query, key = (self._unit(each) for each in (query, key))
        value = value.view(len(x), mixer.value_heads, -1)
        beta = mixer.beta_scale * torch.sigmoid(self._linear(at + "beta", x))
        by_channel = mixer.channel_rank is not None
        low = [self._linear(f"{at}{part}_down", x) if by_channel else x for part in ("decay", "gate")]
        steps = torch.nn.functional.softplus(self._linear(at + "decay", low[0]) + self.tensors[at + "decay_bias"])
        steps = steps.view(len(x), mixer.value_heads, -1)  # the last: 1, or the key's channels
        decay = torch.exp(-self.tensors[at + "decay_log"].view(-1, 1).exp() * steps)
        scale = mixer.key_dim**-0.5 if self.delta_scale is None else self.delta_scale
        state, mixed = torch.zeros(mixer.value_heads, mixer.key_dim, mixer.value_dim), []
        for t in range(len(x)):
            state = state * decay[t, :, :, None]
            found = torch.einsum("hkv,hk->hv", state, key[t])
            state = state + torch.einsum("hk,hv->hkv", key[t], beta[t, :, None] * (value[t] - found))
            mixed.append(torch.einsum("hkv,hk->hv", state, query[t]) * scale)
        made = torch.stack(mixed)
        epsilon = self.block.norm_epsilon if mixer.norm_epsilon is None else mixer.norm_epsilon
        made = made * torch.rsqrt(made.square().mean(-1, keepdim=True) + epsilon)
        made = (made * self.tensors[at + "mixed_norm.weight"]).flatten(1)
        gate = self.delta_gate or (torch.sigmoid if by_channel else silu)
        return self._linear(at + "out", made * gate(self._linear(at + "out_gate", low[1])))

    @staticmethod
    def _unit(states):
        """Of length 1."""
        return states / (states.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def _space(self, layer, x):
        mixer, at = self.block.layers[layer].recurrent, f"layers.{layer}.state."

        def part(name):
            return self._linear(at + name, x) * getattr(mixer, f"{name.removeprefix('out_')}_scale")

        convolved = silu(self._convolved(at, mixer, [part(name) for name in ("value", "key", "query")]))
        keys, shared = mixer.rows["query"], mixer.value_heads // mixer.key_heads
        value, key, query = convolved.split((mixer.mixed_dim, keys, keys), -1)
        query, key = (each.view(len(x), mixer.key_heads, -1).repeat_interleave(shared, 1) for each in (query, key))
        value = value.view(len(x), mixer.value_heads, -1)
        steps = torch.nn.functional.softplus(part("decay") + self.tensors[at + "decay_bias"])
        decay = torch.exp(-self.tensors[at + "decay_log"].exp() * steps)
        state, mixed = torch.zeros(mixer.value_heads, mixer.key_dim, mixer.value_dim), []
        for t in range(len(x)):
            state = state * decay[t, :, None, None]
            state = state + torch.einsum("hk,hv->hkv", key[t], steps[t, :, None] * value[t])
            mixed.append(torch.einsum("hkv,hk->hv", state, query[t]))
        made = torch.stack(mixed) + self.tensors[at + "skip"][:, None] * value
        made, gate = made.flatten(1), silu(part("out_gate"))
        made = made * gate if mixer.gate_first else made
        if (norm := self.tensors.get(at + "mixed_norm.weight")) is not None:
            groups = made.view(len(x), self.norm_groups or mixer.key_heads, -1)
            groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.block.norm_epsilon)
            made = groups.flatten(1) * norm
        return self._linear(at + "out", made if mixer.gate_first else made * gate) * mixer.out_scale

    def _rounded(self, x):
        """Inputs of a block's products, to 8 bits where the block says so."""
        if not self.block.rounded_inputs:
            return x
        scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        return (x * scale).round() / scale

    @staticmethod
    def _alibi(alibi, positions):
        """What is added to scores [heads, queries, keys], but for a constant of each query."""
        if alibi is None:
            return 0.0
        terms = torch.tensor(alibi.slopes)[:, None, None] * positions.float()
        if alibi.rounded:
            terms = (torch.tensor(alibi.slopes).bfloat16()[:, None, None] * positions).float()
        return alibi.scale * terms

    @staticmethod
    def _rotate(states, positions, chosen):
        if chosen is None:
            return states
        angles = positions[:, None].float() * torch.tensor(chosen.inverse_frequency)
        cos, sin = (part(angles)[:, None] * chosen.scaling for part in (torch.cos, torch.sin))
        turned, rest = states[..., : chosen.dims], states[..., chosen.dims :]
        if chosen.style == "half":
            first, second = turned.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
        first, second = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
        return torch.cat((turned, rest), -1)

    def _ffn(self, layer, x, states):
        experts = self.block.layers[layer].experts
        if experts is None:
            return self._neurons(layer, x)
        routed = self._routed(layer, x if experts.router.norm_epsilon is None else self._scaled(layer, states))
        weights = routed.repeat_interleave(experts.size, 1)
        biases = self.tensors.get(f"layers.{layer}.ffn.expert_down_bias")
        if experts.shared:
            gate = self.tensors.get(f"layers.{layer}.shared_gate.weight")
            shared = torch.ones(len(x), 1) if gate is None else torch.sigmoid(x @ gate.T)
            weights = torch.cat((weights, shared.expand(-1, experts.shared)), 1)
        return self._neurons(layer, x, weights) + (0.0 if biases is None else routed @ biases)

    def _scaled(self, layer, states):
        """What a router with a norm of its own reads."""
        epsilon = self.block.experts.router.norm_epsilon
        normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + epsilon)
        return normed * self.tensors[f"layers.{layer}.router_scale"] * states.shape[-1] ** -0.5

    def _routed(self, layer, x):
        """Weights [tokens, experts] of the experts; 0 of those not chosen."""
        experts, router = self.block.experts, self.block.experts.router
        name = f"layers.{layer}.{'wide_' * (f'layers.{layer}.wide_router.weight' in self.tensors)}router"
        products = self._linear(name, x)
        if router.softcap:
            products = router.softcap * (products / router.softcap).tanh()
        scores = {"softmax": products.softmax(-1), "sigmoid": products.sigmoid()}.get(router.score, products)
        keys = scores + self.tensors.get(f"layers.{layer}.choice.bias", 0.0)
        groups = keys.view(len(x), router.groups, -1)
        best = groups.topk(min(2 if router.groups_by == "two" else 1, groups.shape[-1])).values.sum(-1)
        counted = torch.zeros_like(best).scatter(-1, best.topk(router.chosen_groups).indices, 1.0).bool()
        keys = groups.masked_fill(~counted[..., None], self.left_out).view(products.shape)
        chosen = keys.topk(experts.chosen).indices
        values = scores.gather(-1, chosen)
        if router.score == "softmax_of_chosen":
            values = values.softmax(-1)
        if router.score == "sparse_mixer":
            left, parts = products, []
            for expert in chosen.T:
                best = left.max(-1, keepdim=True).values
                far = (best - products) / products.abs().maximum(best) > 2 * router.jitter
                parts.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert[:, None]))
                left = left.scatter(-1, expert[:, None], -torch.inf)
            values = torch.cat(parts, -1)
        if router.normalized:
            values = values / (values.sum(-1, keepdim=True) + router.epsilon).clamp(min=router.least_sum)
        values = values * self.tensors.get(f"layers.{layer}.expert_scale", torch.ones(experts.count))[chosen]
        return torch.zeros_like(products).scatter(-1, chosen, values * router.factor)

    def _neurons(self, layer, x, weights=1.0):
        """What they add, each multiplied by its weight [tokens, d_ff]."""
        matrices = self.ffn[layer]  # [d_ff, d_model], down too
        names = [f"layers.{layer}.ffn.{part}_bias" for part in ("up", "gate", "down")]
        up, gate, down = (self.tensors.get(name, torch.zeros(())) for name in names)
        pre = x @ matrices["up"].T + up
        if self.block.gated:
            hidden = self._activation(layer, self._cut(layer, x @ matrices["gate"].T + gate))
            hidden = hidden * OF_UP.get(self.block.activation, lambda h: h)(pre)
        else:
            hidden = self._activation(layer, pre)
        hidden = hidden * weights
        if self.block.sub_norms:
            hidden = self._rounded(self._norm(f"layers.{layer}.ffn_sub_norm", hidden))
        return hidden @ matrices["down"] + down

    def _cut(self, layer, gates):
        """Statistical top-k: what is above a token's mean and so many deviations stays, less by these."""
        by = self.block.layers[layer].gate_deviations
        if by is None:
            return gates
        return (gates - gates.mean(-1, keepdim=True) - by * gates.std(-1, keepdim=True, correction=0)).relu()

    def _activation(self, layer, h):
        if self.block.activation == "fatrelu":
            return h * (h > self.block.layers[layer].activation_threshold)
        h = ACTIVATIONS[self.block.activation](h * self.block.layers[layer].activation_scale)
        return h * (h.abs() >= self.block.layers[layer].activation_cut)
