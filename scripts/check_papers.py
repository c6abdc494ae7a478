"""Record the checksums of the papers' published values, after a correction was compared with the paper.

python scripts/check_papers.py                 # which documents differ from their checksum
python scripts/check_papers.py --accept aas    # the values of this document are right
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vitadel.papers import paper_documents

FOLDER = Path(paper_documents.__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", nargs="+", choices=paper_documents.DOCUMENTS, default=[])
    accepted = parser.parse_args().accept
    recorded = paper_documents.recorded_checksums()
    for name in paper_documents.DOCUMENTS:
        paper = paper_documents.parse_paper((FOLDER / f"{name}.yaml").read_text("utf-8"), name)
        found = paper_documents.values_checksum(paper)
        if recorded.get(name) != found:
            print(f"{name}: {'accepted' if name in accepted else 'differs'}")
            recorded[name] = found if name in accepted else recorded.get(name, "")
    (FOLDER / "checksums.json").write_text(json.dumps(recorded, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
