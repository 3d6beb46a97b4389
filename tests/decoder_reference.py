"""A decoder in numpy, float64, one row, one query, one expert at a time."""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def frequencies(config):
    half = config.head_dim // 2
    out = []
    for i in range(half):
        f = config.rope_theta ** (-2 * i / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind == 'linear':
            f = f / scaling.factor
        elif scaling is not None:
            wavelength = 2 * np.pi / f
            if wavelength > scaling.original_length / scaling.low:
                f = f / scaling.factor
            elif wavelength >= scaling.original_length / scaling.high:
                smooth = (scaling.original_length / wavelength - scaling.low) / (
                    scaling.high - scaling.low
                )
                f = (1 - smooth) * f / scaling.factor + smooth * f
        out.append(f)
    return np.array(out)


def rotated(x, position, config):
    """x [hd] as complex pairs (i, i + hd/2) turned by position * frequency."""
    half = config.head_dim // 2
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * frequencies(config))
    return np.concatenate([turned.real, turned.imag])


def attend(x, p, config):
    length = len(x)
    per = config.num_heads // config.num_kv_heads
    q = np.einsum('td,dhk->thk', x, p['q']) + p.get('q_bias', 0)
    k = np.einsum('td,dhk->thk', x, p['k']) + p.get('k_bias', 0)
    v = np.einsum('td,dhk->thk', x, p['v']) + p.get('v_bias', 0)
    if config.qk_norm:
        q, k = norm(q, p['q_norm'], config.norm_eps), norm(k, p['k_norm'], config.norm_eps)
    out = np.zeros((length, config.embed_dim))
    for t in range(length):
        for h in range(config.num_heads):
            query = rotated(q[t, h], t, config)
            keys = np.stack([rotated(k[s, h // per], s, config) for s in range(t + 1)])
            w = np.exp(keys @ query / np.sqrt(config.head_dim))
            out[t] += (w / w.sum() @ v[: t + 1, h // per]) @ p['o'][h]
    return out


def feed(x, p):
    return (silu(x @ p['gate']) * (x @ p['up'])) @ p['down']


def mixture(x, p, config):
    """Softmax router with renormalised gates over the k best, one token at a time."""
    out, chosen = np.zeros_like(x), []
    for t in range(len(x)):
        logits = p['router'] @ x[t]
        best = np.argsort(-logits, kind='stable')[: config.moe.top_k]
        gates = np.exp(logits[best]) / np.exp(logits[best]).sum()
        for e, gate in zip(best, gates, strict=True):
            out[t] += gate * feed(x[t], {n: p[n][e] for n in ('gate', 'up', 'down')})
        if 'shared' in p:
            out[t] += feed(x[t], p['shared'])
        chosen.append(best)
    return out, np.array(chosen)


def take(tree, i):
    if isinstance(tree, dict):
        return {name: take(value, i) for name, value in tree.items()}
    return np.asarray(tree[i], np.float64)


def forward(params, tokens, config):
    """One row of tokens [T]: states after the final norm [T,D] and experts [T,L_moe,k]."""
    x = np.asarray(params['embed'], np.float64)[tokens]
    done, routing = {'dense': 0, 'moe': 0}, []
    for kind in config.kinds:
        p = take(params[kind], done[kind])
        done[kind] += 1
        x = x + attend(norm(x, p['norm1'], config.norm_eps), p['attention'], config)
        inner = norm(x, p['norm2'], config.norm_eps)
        if kind == 'dense':
            x = x + feed(inner, p['mlp'])
        else:
            y, chosen = mixture(inner, p['mlp'], config)
            x = x + y
            routing.append(chosen)
    x = norm(x, np.asarray(params['norm'], np.float64), config.norm_eps)
    return x, np.stack(routing, axis=1) if routing else None
