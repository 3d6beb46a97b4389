"""Checks a second: `math_equivalence` in workers, and a task's scorer there and in this process.

python -m experiments.bench_rewards [--workers=2] [--rows=2000]
"""

import argparse
import resource
import time

from policyopt.rewards import Case, JudgeConfig, Spec, make_judge

# Right answers of competition problems, and answers: integers and fractions mostly, some formulas.
# The number @ differs from problem to problem; each has eight answers, of two or three kinds.
MATH = (
    ('@04', (r'Then the sum is @04, so the answer is \boxed{@04}.', r'\boxed{@40}')),
    ('@4', (r'\boxed{@4}', 'I do not know; perhaps @3.', r'\boxed{@4.0}')),
    (r'\frac{3}{@}', (r'so it is \boxed{\frac{6}{2 \cdot @}}', r'\boxed{3/@}', r'\boxed{@}')),
    (r'\frac{@}{4}', (r'so it is \boxed{\dfrac{@}{4}}', r'\boxed{@/8}')),
    (r'2\sqrt{@}', (r'\boxed{\sqrt{4 \cdot @}}', r'\boxed{2\sqrt{@}}', r'\boxed{2@}')),
    (r'(@, \frac{\pi}{2})', (r'\boxed{\left(@,\frac{\pi}{2}\right)}', r'\boxed{(@, \pi)}')),
    ('@', (r'\boxed{@ \text{ apples}}', r'\boxed{@}')),
    ('x^2+2x+@', (r'\boxed{(x+1)^2+@-1}', r'\boxed{x^2+@}')),
)
SUM = (('@32', ('@32', '@31')),)


def cases(problems, rows):
    found = []
    for i in range(rows):
        right, texts = problems[i // 8 % len(problems)]
        right, text = (x.replace('@', str(3 + i // 8)) for x in (right, texts[i % len(texts)]))
        found.append(Case(text, (1, 2, 3), {'answer': right}))
    return found


def rate(spec, problems, workers, rows):
    """(rows a second by the clock, milliseconds of processor time a row, seconds to start)."""
    judge = make_judge(
        spec, JudgeConfig(workers=workers, **(dict(deadline=60.0) if workers else {}))
    )
    began = time.monotonic()
    for future in judge.submit(cases(problems, 8 * len(problems))):
        future.result()
    start = time.monotonic() - began
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    began = time.monotonic()
    for future in judge.submit(cases(problems, rows)):
        future.result()
    seconds = time.monotonic() - began
    judge.close()  # its processes are waited for, and their time is known
    spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    return rows / seconds, 1e3 * spent / rows, start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--workers', type=int, default=2)
    parser.add_argument('--rows', type=int, default=2000)
    given = parser.parse_args()
    scorer = Spec('policyopt.rewards.graded', {'score': Spec('policyopt.rewards.scorers.exact')})
    math = Spec('policyopt.rewards.math_equivalence')
    for name, spec, problems, workers in (
        ('math_equivalence', math, MATH, given.workers),
        ('exact match', scorer, SUM, given.workers),
        ('exact match', scorer, SUM, 0),
    ):
        speed, spent, start = rate(spec, problems, workers, given.rows)
        print(
            f'{name}, {workers} workers: {speed:,.0f} rows/s, {spent:.2f} ms of processor time a '
            f'row (start included), {start:.1f} s to the first rows'
        )


if __name__ == '__main__':
    main()
