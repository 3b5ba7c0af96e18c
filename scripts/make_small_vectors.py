#!/usr/bin/env python3
"""Small reference vectors of our own for the tests that have no outside data.

    scripts/make_small_vectors.py        writes tests/fixtures/vectors/ anew

Plain Python, no packages. The values come from the formulas as they are written in the papers, in f64; gradients are
central differences of the value, or of the surrogate whose detached factors are held fixed. Inputs are multiples of
2^-6, so that f32 holds them exactly. The rows have the form of the outside vectors (scripts/fetch_data.sh), the names of
whose functions say which formula is meant.
"""

import json
import math
import random
from fractions import Fraction
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "vectors"
ROWS, WIDTH = 6, 5
INDEX = [0, 0, 0, 1, 1, 1]
STEP = 1e-6


def grid(rng, low, high):
    return rng.randint(int(low * 64), int(high * 64)) / 64


def table(rng, low, high):
    return [[grid(rng, low, high) for _ in range(WIDTH)] for _ in range(ROWS)]


def ragged(rng):
    """A mask whose rows end at different places, with a hole."""
    mask = [[1 if t < 1 + rng.randrange(WIDTH) or t == 0 else 0 for t in range(WIDTH)] for _ in range(ROWS)]
    mask[2] = [1, 1, 0, 1, 1]
    return mask


def cells(mask):
    return [(r, t) for r in range(len(mask)) for t in range(WIDTH) if mask[r][t]]


def aggregate(mode, values, mask):
    """`values[r][t]` to one number."""
    rows = [[values[r][t] for t in range(WIDTH) if mask[r][t]] for r in range(len(mask))]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        flat = [v for row in rows for v in row]
        return sum(flat) / len(flat)
    if mode == "token-sum":
        return sum(v for row in rows for v in row)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if mode == "seq-mean-token-sum":
        return sum(sum(row) for row in rows) / len(rows)
    return sum(sum(row) for row in rows) / len(rows) / WIDTH


MODES = ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def differences(value, at, mask):
    """d value / d at[r][t] where the mask is 1, else 0."""
    gradient = [[0.0] * WIDTH for _ in at]
    for r, t in cells(mask):
        moved = [row[:] for row in at]
        moved[r][t] = at[r][t] + STEP
        above = value(moved)
        moved[r][t] = at[r][t] - STEP
        gradient[r][t] = (above - value(moved)) / (2 * STEP)
    return gradient


def row(name, function, inputs, params, expected):
    return {"name": name, "fn": function, "inputs": inputs, "params": params, "expected": expected,
            "noise_f32_vs_f64": {}}


def mean(values):
    return sum(values) / len(values)


def deviation(values):
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def spread(scores, mask):
    return [[scores[r] if mask[r][t] else 0.0 for t in range(WIDTH)] for r in range(ROWS)]


def whiten(values, mask):
    flat = [values[r][t] for r, t in cells(mask)]
    centre, variance = mean(flat), deviation(flat) ** 2
    scale = 1 / math.sqrt(variance + 1e-8)
    return [[(values[r][t] - centre) * scale if mask[r][t] else 0.0 for t in range(WIDTH)] for r in range(ROWS)]


def to_go(rewards, mask):
    """Rewards of valid tokens still to come."""
    returns = [[0.0] * WIDTH for _ in range(ROWS)]
    for r in range(ROWS):
        valid = [t for t in range(WIDTH) if mask[r][t]]
        for i, t in enumerate(valid):
            returns[r][t] = sum(rewards[r][u] for u in valid[i:])
    return returns


def advantages():
    for seed in range(4):
        rng = random.Random(seed)
        mask = ragged(rng)
        rewards = [[0.0] * WIDTH for _ in range(ROWS)]
        for r in range(ROWS):
            rewards[r][max(t for t in range(WIDTH) if mask[r][t])] = grid(rng, -1, 2)
        scores = [sum(rewards[r]) for r in range(ROWS)]
        inputs = {"token_level_rewards": rewards, "response_mask": mask}
        grouped = dict(inputs, index=INDEX)
        groups = [scores[:3], scores[3:]]
        grpo = [(s - mean(g)) / (deviation(g) + 1e-6) for g in groups for s in g]
        centred = [s - mean(g) for g in groups for s in g]
        others = [s - (sum(g) - s) / (len(g) - 1) for g in groups for s in g]
        yield row(f"grpo/own/{seed}", "compute_grpo_outcome_advantage", grouped,
                  {"norm_adv_by_std_in_grpo": True, "epsilon": 1e-6}, {"advantages": spread(grpo, mask)})
        yield row(f"dr_grpo/own/{seed}", "compute_grpo_outcome_advantage", grouped,
                  {"norm_adv_by_std_in_grpo": False, "epsilon": 1e-6}, {"advantages": spread(centred, mask)})
        yield row(f"rloo/own/{seed}", "compute_rloo_outcome_advantage", grouped, {},
                  {"advantages": spread(others, mask)})
        lengths = [sum(line) for line in mask]
        part = lambda values, g: values[3 * g : 3 * g + 3]
        opo = [s - sum(l * x for l, x in zip(part(lengths, g), part(scores, g))) / sum(part(lengths, g))
               for g in (0, 1) for s in part(scores, g)]
        yield row(f"opo/own/{seed}", "compute_opo_outcome_advantage", grouped, {}, {"advantages": spread(opo, mask)})
        gains = [abs(s) for s in scores]
        maxrl = [(s - mean(part(gains, g))) / (mean(part(gains, g)) + 1e-6) for g in (0, 1) for s in part(gains, g)]
        positive = dict(grouped, token_level_rewards=[[abs(v) for v in line] for line in rewards])
        yield row(f"maxrl/own/{seed}", "compute_maxrl_outcome_advantage", positive, {},
                  {"advantages": spread(maxrl, mask)})
        yield row(f"reinforce_plus_plus_baseline/own/{seed}", "compute_reinforce_plus_plus_baseline_outcome_advantage",
                  grouped, {}, {"advantages": whiten(spread(centred, mask), mask)})
        returns = to_go(rewards, mask)
        yield row(f"reinforce_plus_plus/own/{seed}/1.0", "compute_reinforce_plus_plus_outcome_advantage", inputs,
                  {"gamma": 1.0}, {"advantages": whiten(returns, mask), "returns": returns})
        baselines = [grid(rng, -1, 1) for _ in range(ROWS)]
        above = [[returns[r][t] - baselines[r] for t in range(WIDTH)] for r in range(ROWS)]
        yield row(f"remax/own/{seed}", "compute_remax_outcome_advantage", dict(inputs, reward_baselines=baselines), {},
                  {"advantages": above, "returns": returns})
        values, gamma, lam = table(rng, -1, 1), 0.75, 0.5
        estimate = [[0.0] * WIDTH for _ in range(ROWS)]
        for r in range(ROWS):
            valid = [t for t in range(WIDTH) if mask[r][t]]
            after = dict(zip(valid, valid[1:]))
            delta = {t: rewards[r][t] + gamma * (values[r][after[t]] if t in after else 0) - values[r][t] for t in valid}
            for i, t in enumerate(valid):
                estimate[r][t] = sum((gamma * lam) ** k * delta[u] for k, u in enumerate(valid[i:]))
        returns = [[estimate[r][t] + values[r][t] for t in range(WIDTH)] for r in range(ROWS)]
        yield row(f"gae/own/{seed}", "compute_gae_advantage_return", dict(inputs, values=values),
                  {"gamma": gamma, "lam": lam}, {"advantages_unwhitened": estimate, "advantages": whiten(estimate, mask),
                                                 "returns": returns})


# Temperatures of SAPO; power and decay of VESPO.
COV = {"clip_cov_lb": 0.05, "clip_cov_ub": 0.75, "ppo_kl_coef": 0.5}
SOFT = {"tau_pos": 1.0, "tau_neg": 1.05, "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


def clip(value, low, high):
    return min(max(value, low), high)


def losses():
    low, high, dual = 0.2, 0.28, 3.0
    for seed, mode in enumerate(MODES):
        rng = random.Random(100 + seed)
        mask, old = ragged(rng), table(rng, -2, -0.25)
        # Off the grid by a third of a step: no ratio meets a clip.
        now = [[o + grid(rng, -1.5, 1.5) + 1 / 256 for o in line] for line in old]
        scores = [grid(rng, -2, 2) or 0.5 for _ in range(ROWS)]
        gain = [[s] * WIDTH for s in scores]
        inputs = {"old_log_prob": old, "log_prob": now, "advantages": gain, "response_mask": mask}
        params = {"loss_agg_mode": mode, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual, **SOFT}

        def surrogate(a, ratio):
            return max(-a * ratio, -a * clip(ratio, 1 - low, 1 + high))

        def ppo(at):
            def term(r, t):
                ratio = math.exp(at[r][t] - old[r][t])
                loss = surrogate(scores[r], ratio)
                return min(loss, -scores[r] * dual) if scores[r] < 0 else loss
            return aggregate(mode, [[term(r, t) for t in range(WIDTH)] for r in range(ROWS)], mask)

        def cispo(at):
            # The weight is detached: it stays where the policy is now.
            def term(r, t):
                return -clip(math.exp(now[r][t] - old[r][t]), 1 - low, 1 + high) * scores[r] * at[r][t]
            return aggregate(mode, [[term(r, t) for t in range(WIDTH)] for r in range(ROWS)], mask)

        def gspo(at):
            def term(r, t):
                valid = [u for u in range(WIDTH) if mask[r][u]]
                fixed = mean([now[r][u] - old[r][u] for u in valid])
                return surrogate(scores[r], math.exp(fixed + at[r][t] - now[r][t]))
            return aggregate(mode, [[term(r, t) for t in range(WIDTH)] for r in range(ROWS)], mask)

        def geo_mean(at):
            total = 0.0
            for r in range(ROWS):
                valid = [u for u in range(WIDTH) if mask[r][u]]
                bound = (lambda x: min(x, high)) if scores[r] > 0 else (lambda x: max(x, -low))
                total -= scores[r] * math.exp(mean([bound(at[r][u] - old[r][u]) for u in valid]))
            return total / ROWS

        def reinforce(at):
            return aggregate(mode, [[-scores[r] * at[r][t] for t in range(WIDTH)] for r in range(ROWS)], mask)

        def each(term):
            return lambda at: aggregate(mode, [[term(at, r, t) for t in range(WIDTH)] for r in range(ROWS)], mask)

        def sapo(at, r, t):
            tau = SOFT["tau_pos"] if scores[r] > 0 else SOFT["tau_neg"]
            return -scores[r] * 4 / tau / (1 + math.exp(-tau * (math.exp(at[r][t] - old[r][t]) - 1)))

        def vespo(at, r, t):
            # Weight and mask are detached, here as in DPPO: they stay where the policy is now.
            total = clip(sum(now[r][u] - old[r][u] for u in range(WIDTH) if mask[r][u]), math.log(1e-8), 20)
            power, decay = ("k_pos", "lambda_pos") if scores[r] >= 0 else ("k_neg", "lambda_neg")
            return -math.exp(SOFT[power] * total + SOFT[decay] * (1 - math.exp(total))) * scores[r] * at[r][t]

        # DPPO reads probabilities: these log-probs are below 0.
        below = [[-abs(v) for v in line] for line in now]

        def dppo(divergence):
            def term(at, r, t):
                p, q = math.exp(below[r][t]), math.exp(old[r][t])
                apart = divergence(p, q)
                masked = p > q and apart > high if scores[r] > 0 else p < q and apart > low
                return 0.0 if masked else -scores[r] * min(p / q, dual) * at[r][t]
            return each(term)

        def binary_kl(p, q):
            return q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))

        # Clip-Cov takes every token of its range here, so that nothing is random. KL-Cov takes the first third.
        valid = cells(mask)
        mean_gain, mean_now = mean([scores[r] for r, _ in valid]), mean([now[r][t] for r, t in valid])
        covariance = {(r, t): (scores[r] - mean_gain) * (now[r][t] - mean_now) for r, t in valid}
        in_range = {cell for cell, value in covariance.items() if COV["clip_cov_lb"] < value < COV["clip_cov_ub"]}
        highest = sorted(valid, key=lambda cell: -covariance[cell])[:max(1, int(len(valid) / 3))]

        def clip_cov(at, r, t):
            return 0.0 if (r, t) in in_range else surrogate(scores[r], math.exp(at[r][t] - old[r][t]))

        def kl_cov(at, r, t):
            apart = at[r][t] - old[r][t]
            return -scores[r] * math.exp(apart) + (COV["ppo_kl_coef"] * abs(apart) if (r, t) in highest else 0)

        for family, value in [("vanilla", ppo), ("cispo", cispo), ("gspo", gspo), ("geo_mean", geo_mean),
                              ("reinforce", reinforce), ("sapo", each(sapo)), ("vespo", each(vespo)),
                              ("dppo_tv", dppo(lambda p, q: abs(p - q))), ("dppo_kl", dppo(binary_kl)),
                              ("clip_cov", each(clip_cov)), ("kl_cov", each(kl_cov))]:
            given, here, settings, selected = inputs, now, params, {}
            if family.startswith("dppo"):
                given, here = dict(inputs, log_prob=below), below
            if family.endswith("_cov"):
                chosen = in_range if family == "clip_cov" else highest
                selected = {"selected": [[int((r, t) in chosen) for t in range(WIDTH)] for r in range(ROWS)]}
                given = dict(inputs, **selected)
                settings = dict(params, cov_fraction=1.0 if family == "clip_cov" else 1 / 3, **COV)
            if family == "reinforce":
                given = {("rollout_log_prob" if k == "old_log_prob" else k): v for k, v in inputs.items()}
            yield row(f"{family}/own/{mode}", f"compute_policy_loss_{family}", given, settings,
                      {"loss": value(here), "grad_log_prob": differences(value, here, mask), **selected})


def divergences():
    rng = random.Random(7)
    now, reference = table(rng, -2, -0.25), table(rng, -2, -0.25)
    # Apart everywhere: |d| has a kink at 0.
    reference = [[v + 1 / 256 for v in line] for line in reference]
    estimators = {"k1": lambda d: d, "abs": abs, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) + d - 1}
    for name, value in estimators.items():
        apart = [[n - f for n, f in zip(a, b)] for a, b in zip(now, reference)]
        slope = [[(value(d + STEP) - value(d - STEP)) / (2 * STEP) for d in line] for line in apart]
        for suffix, gradient in [("", slope), ("+", apart)]:
            if name != "k2" or not suffix:
                yield row(f"kl_penalty/own/{name}{suffix}", "kl_penalty", {"logprob": now, "ref_logprob": reference},
                          {"kl_penalty": name + suffix},
                          {"kl": [[value(d) for d in line] for line in apart], "grad_logprob": gradient})


def aggregations():
    for seed, mode in enumerate(MODES):
        rng = random.Random(200 + seed)
        mask, terms = ragged(rng), table(rng, -2, 2)
        value = lambda at: aggregate(mode, at, mask)
        yield row(f"agg_loss/own/{mode}", "agg_loss", {"loss_mat": terms, "loss_mask": mask}, {"loss_agg_mode": mode},
                  {"loss": value(terms), "grad_loss_mat": differences(value, terms, mask)})


def weights():
    for seed in range(2):
        rng = random.Random(300 + seed)
        mask, ratio = ragged(rng), table(rng, -1, 1)
        total = [sum(ratio[r][t] for t in range(WIDTH) if mask[r][t]) for r in range(ROWS)]
        for level in ["token", "sequence"]:
            rho = lambda r, t: math.exp(ratio[r][t] if level == "token" else clip(total[r], -20, 20))
            bounded = [[min(rho(r, t), 2.0) if mask[r][t] else 0.0 for t in range(WIDTH)] for r in range(ROWS)]
            yield row(f"rollout_is/own/{level}/{seed}", "compute_rollout_correction_weights",
                      {"log_ratio": ratio, "response_mask": mask},
                      {"rollout_is": level, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False},
                      {"rollout_is_weights": bounded})


def off_policy_masks():
    bound = 0.125
    for seed in range(2):
        rng = random.Random(400 + seed)
        mask, old, now = ragged(rng), table(rng, -2, -0.25), table(rng, -2, -0.25)
        gain = [[grid(rng, -2, 2)] * WIDTH for _ in range(ROWS)]
        apart = [mean([old[r][t] - now[r][t] for t in range(WIDTH) if mask[r][t]]) for r in range(ROWS)]
        yield row(f"off_policy_mask/own/{seed}", "get_off_policy_mask",
                  {"old_log_prob": old, "log_prob": now, "advantages": gain, "response_mask": mask}, {"bound": bound},
                  {"masked": [int(gain[r][0] < 0 and apart[r] > bound) for r in range(ROWS)]})


def answers():
    """Pairs of spellings of numbers, equal where the numbers are."""
    rng = random.Random(11)
    number = 0
    for _ in range(24):
        a = Fraction(rng.randint(-40, 40), rng.choice([1, 2, 4, 5, 8, 10]))
        b = a if rng.random() < 0.5 else a + Fraction(rng.choice([-1, 1]), rng.choice([2, 4, 5]))
        sign = "-" if b < 0 else ""
        spellings = [str(float(b)), f"{b.numerator}/{b.denominator}",
                     f"{sign}\\frac{{{abs(b.numerator)}}}{{{b.denominator}}}"]
        for spelling in spellings:
            number += 1
            yield {"id": f"own.{number}", "gold": f"${float(a)}$", "answer": f"${spelling}$", "expected": a == b,
                   "match_types": ["latex", "expr"], "precision": 6}


def write(name, rows):
    path = OUT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    print(f"{name}: {len(rows)} rows")


def main():
    for name, rows in [("advantages", advantages), ("losses", losses), ("kl", divergences),
                       ("aggregation", aggregations), ("rollout_is", weights),
                       ("off_policy_mask", off_policy_masks)]:
        write(f"policy-vectors/{name}.jsonl", rows())
    write("math-equiv/own.jsonl", answers())


if __name__ == "__main__":
    main()
