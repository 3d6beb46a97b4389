"""Markdown pages, taken apart: links, anchors, blocks, commands, tables of metrics."""

import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
FENCE = re.compile(r'^(?P<space> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=space)```$', re.M | re.S)


@functools.cache
def read(page: pathlib.Path) -> str:
    return page.read_text(encoding='utf-8')


def blocks(page: pathlib.Path) -> list[tuple[str, str]]:
    """(info, body) of each fenced block in order, dedented."""
    found = []
    for match in FENCE.finditer(read(page)):
        width = len(match['space'])
        lines = [line[width:] for line in match['body'].splitlines(keepends=True)]
        found.append((match['info'].strip(), ''.join(line or '\n' for line in lines)))
    return found


def prose(page: pathlib.Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub('', read(page))


@functools.cache
def anchors(page: pathlib.Path) -> set[str]:
    """What links to the page may name behind #, as GitHub makes it of headings."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r'^#{1,6} +(.*?) *#*$', prose(page), re.M):
        text = re.sub(r'!?\[([^\]]*)\]\([^)]*\)', r'\1', heading).replace('`', '')
        slug = re.sub(r'[^\w\- ]', '', text.lower()).replace(' ', '-')
        times = found[slug] = found.get(slug, -1) + 1
        names.add(f'{slug}-{times}' if times else slug)
    return names


def links(page: pathlib.Path) -> list[str]:
    """Targets of links and images, those of other sites left out."""
    text = re.sub(r'`[^`\n]*`', '', prose(page))
    targets = re.findall(r'\]\(([^)\s]+)\)', text)
    return [t for t in targets if '://' not in t and not t.startswith('mailto:')]


def broken(page: pathlib.Path) -> list[str]:
    """Links of the page that lead nowhere."""
    found = []
    for link in links(page):
        path, _, anchor = link.partition('#')
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == '.md' and anchor not in anchors(target)
        ):
            found.append(link)
    return found


def commands(page: pathlib.Path) -> list[str]:
    """Command lines that the page gives: `python -m ...` and `make ...`, joined where continued."""
    quoted = re.findall(r'`((?:[\w./]*python -m|make) [^`]*)`', prose(page))
    shown = [line for _, body in blocks(page) for line in body.replace('\\\n', ' ').splitlines()]
    indented = re.findall(r'^    +((?:[\w./]*python -m|make) .*(?:\\\n.*)*)', prose(page), re.M)
    found = []
    for line in [*quoted, *shown, *(text.replace('\\\n', ' ') for text in indented)]:
        line = ' '.join(line.split())
        match = re.search(r'(?:^|[\s/])(python -m \w.*|make [a-z].*)', line)
        if match and (match[1].startswith('python') or line.startswith('make')):
            found.append(re.split(r'\s+#|\s&(?:\s|$)', match[1])[0])
    return found


# ============================================================================ metrics

DASHBOARD = ROOT / 'docs' / 'dashboard.md'


@functools.cache
def _documented() -> re.Pattern[str]:
    """What names the tables of docs/dashboard.md have; CAPITALS stand for any part of a name."""
    names = set()
    for row in re.findall(r'^\| (`[^|]*) \|', prose(DASHBOARD), re.M):
        names |= set(re.findall(r'`([^`]+)`', row))
    patterns = []
    for name in sorted(names):
        parts = re.split(r'([A-Z]{2,}|\bK\b|\bN\b)', name)
        patterns.append(''.join('[^/]+' if i % 2 else re.escape(p) for i, p in enumerate(parts)))
    return re.compile('|'.join(patterns))


def undocumented(names) -> list[str]:
    """Names of metrics that docs/dashboard.md does not explain."""
    return sorted(name for name in set(names) if not _documented().fullmatch(name))


def undocumented_of(workdir: pathlib.Path) -> list[str]:
    """The same of all that a run wrote down."""
    from policyopt import metrics

    records = [
        record
        for file in ('metrics.jsonl', 'timings.jsonl')
        if (workdir / file).exists()
        for record in metrics.read(workdir / file)
        if record['stage'] != 'start'
    ]
    return undocumented({n for record in records for n in record} - {'stage', 'step', 'time'})
