"""Style of the report: one column, in the reader's font, light or dark as the system."""

STYLE = """
:root { color-scheme: light dark;
  --page: #fff; --ink: #1f2328; --faint: #6e7781; --line: #d8dee4; --card: #f6f8fa;
  --train: #2f6fb7; --test: #c2410c; --comm: #b4457a; --wait: #9aa3ad; --read: #8a6d3b;
  --forward: #2f6fb7; --backward: #b45309; --input: #92650a; --weight: #2e7d4f; }
@media (prefers-color-scheme: dark) { :root {
  --page: #15181c; --ink: #e3e6ea; --faint: #98a1ab; --line: #343a42; --card: #1e2329;
  --train: #6ea8ea; --test: #f2995c; --comm: #e085ac; --wait: #6b7480; --read: #c9a86a;
  --forward: #6ea8ea; --backward: #eda35f; --input: #d9b45b; --weight: #6cc48f; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto;
  padding: 1.2rem 1rem 3rem; color: var(--ink); background: var(--page); }
h1 { font-size: 1rem; font-weight: 600; color: var(--faint); margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
.answer { font-size: 1.35rem; line-height: 1.35; margin: .3rem 0 1rem; font-weight: 600; }
p, .note { margin: .3rem 0; } .note { color: var(--faint); font-size: .9rem; }
svg { display: block; width: 100%; min-width: 44rem; height: auto; }
svg text { font-family: inherit; }
@media (max-width: 30rem) { .answer { font-size: 1.15rem; } table { font-size: .88rem; }
  .rank p { font-size: .84rem; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .95rem; }
td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { font-weight: 600; color: var(--faint); }
td:first-child { white-space: nowrap; }
summary { cursor: pointer; color: var(--faint); margin: .5rem 0; }
.rank { margin: .55rem 0; } .rank p { margin: 0; display: flex; flex-wrap: wrap;
  justify-content: space-between; gap: 0 1rem; font-size: .92rem; }
.bar { display: flex; height: 1.1rem; border-radius: 3px; overflow: hidden;
  background: var(--card); }
.bar i { display: block; height: 100%; }
.bar i + i { border-left: 1px solid var(--page); }
.c { background: var(--train); } .s { background: var(--comm); } .w { background: var(--wait); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .92rem; margin: .3rem 0; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .4em; }
"""
