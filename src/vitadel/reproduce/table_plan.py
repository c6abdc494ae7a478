"""What a table will run, the files it needs, and what that costs, before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitadel.errors import UserError
from vitadel.papers.paper_documents import DOCUMENTS, read_paper
from vitadel.reproduce.jobs import TableJobs
from vitadel.reproduce.required_files import published_weights, required_files
from vitadel.training.recipes.compose import compose

if TYPE_CHECKING:
    from vitadel.reproduce.dry_run import DryRun


_WITHOUT_DATA = {"model": "size of the model", "training": "what the training recorded"}


def summaries() -> list[tuple[str, str]]:
    """Every table and figure: what it shows, what it needs, what it costs."""
    found = []
    for name in DOCUMENTS:
        paper = read_paper(name)
        for item in paper.items:
            needs = ", ".join(item.data) or "no files"
            small = f"; --small about {item.small.minutes} min on a core" if item.small else ""
            cost = f"{item.gpu_hours:g} h{small}"
            found.append((f"{name}/{item.id}", f"{item.title}. {len(item.rows)} rows; {needs}; {cost}"))
        found += [(f"{name}/{key}", f"nothing to reproduce: {text}") for key, text in paper.illustrations.items()]
    return found


def plan_table(table: TableJobs, dry_run: DryRun | None = None) -> dict[str, Any]:
    """The plan as data. Models are built, recipes and evaluations checked: what a plan names can start.

    A `dry_run` that is given saves models which several tables share.
    """
    from vitadel.reproduce.dry_run import DryRun, count_classes
    from vitadel.reproduce.evaluations import check_evaluation
    from vitadel.reproduce.gpu_hours import H100_GAIN, training_hours
    from vitadel.training.recipes.build import build_recipe

    built = (dry_run or DryRun()).build_models(table)
    trainings = []
    for training in table.trainings():
        recipe = build_recipe(compose(training.recipe, training.row, training.overrides), training.name)
        made = built[training.name]
        hours = training_hours(recipe, made.macs, count_classes(recipe.data.train))
        trainings.append(
            {
                "training": training.name,
                "recipe": training.recipe,
                "row": training.row,
                "changes": dict(training.overrides),
                "after": [each.name for each in training.earlier],
                "epochs": recipe.epochs,
                "model": recipe.model.name,
                "parameters": made.parameters,
                "trained": made.trained,
                "a100_hours": hours,
                "h100_hours": None if hours is None else hours / H100_GAIN,
            }
        )
    evaluations: dict[str, dict[str, Any]] = {}
    for job in table.jobs:
        for name, evaluation in job.evaluations.items():
            entry = evaluations.setdefault(
                job.evaluation_name(name),
                {"run": evaluation.run, "data": evaluation.data or job.test_data, **evaluation.settings, "rows": []},
            )
            if entry["data"] is None and evaluation.run not in ("probe", "training", "model"):
                raise UserError(f"{table.name}, row {job.row.id}: no test data is named for {name}")
            if not entry["rows"]:
                read = [
                    job.values[column.id] for column in table.columns if column.of == name and column.id in job.values
                ]
                check_evaluation(evaluation, [value for value in read if value != "page"])
            if job.row.id not in entry["rows"]:
                entry["rows"].append(job.row.id)
    item = table.item
    return {
        "table": table.name,
        "title": item.title,
        "protocol": item.protocol,
        "small": item.small.about if table.request.small and item.small else None,
        "seeds": table.seeds,
        "experiment": None if item.experiment is None else item.experiment.text(),
        "trainings": trainings,
        "models": [
            {"model": job.row.model, "rows": [job.row.id], "parameters": built[job.model_name].parameters}
            for job in table.jobs
            if job.training is None and job.have is None
        ],
        "evaluations": evaluations,
        "files": [
            {
                "data": each.name,
                "path": str(each.path),
                "there": each.there,
                "gigabytes": each.data.gigabytes,
                "where": each.data.where,
                "rows": list(each.rows),
            }
            for each in required_files(table)
        ],
        "weights": published_weights(table),
        "needs": dict(table.lacking),
        "cost": _cost(table),
    }


def _cost(table: TableJobs) -> str:
    from vitadel.reproduce.gpu_hours import H100_GAIN

    item = table.item
    # The cost of an experiment is that of all its seeds.
    seeds = table.seeds if item.experiment is None else round(table.seeds / item.experiment.seeds, 2)
    if table.request.small and item.small is not None:
        return f"about {item.small.minutes * seeds:g} minutes of one CPU core (estimate)"
    rows = len({job.row.id for job in table.jobs})
    share = f"; {rows} of its {len(item.rows)} rows are chosen" if rows < len(item.rows) else ""
    hours = item.gpu_hours * seeds
    gpus = f"about {hours:g} hours of an A100 (at least {hours / H100_GAIN:.2g} of an H100)"
    return f"{gpus} for all rows (estimate: {item.cost_basis}){share}"


def time_here(table: TableJobs) -> str:
    """How long the first training would take on this machine, by a short measurement; why not, if it cannot start."""
    from vitadel.quantities import duration
    from vitadel.runtime.distributed import join_processes
    from vitadel.training.recipes.build import build_recipe
    from vitadel.training.run import open_training
    from vitadel.training.training_cost import plan_training

    trainings = table.trainings()
    if not trainings:
        return "nothing is trained"
    first = trainings[0]
    missing = [each.name for each in required_files(table) if not each.there]
    if missing:
        return f"not measured, as data is missing: {', '.join(missing)}"
    try:
        processes = join_processes()
        recipe = build_recipe(compose(first.recipe, first.row, {**first.overrides, "data.test": None}), first.name)
        cost = plan_training(open_training(recipe, processes, table.request.data_root), processes)
    except (UserError, OSError) as error:
        return f"not measured: {error}"
    return f"{first.name} takes about {duration(cost['seconds_likely'])} on {cost['device']}, {cost['threads']} threads"


def plan_text(plan: dict[str, Any]) -> str:
    """The plan as text."""
    lines = [f"{plan['table']}: {plan['title']}", f"protocol: {plan['protocol']}"]
    if plan["small"]:
        lines.append(f"in small: {plan['small']}")
    if plan["experiment"]:
        lines += ["", plan["experiment"]]
    lines.append(f"\n{len(plan['trainings'])} trainings ({plan['seeds']} seed{'s' * (plan['seeds'] > 1)})")
    for each in plan["trainings"]:
        after = f", after {', '.join(each['after'])}" if each["after"] else ""
        size = f"{each['parameters'] / 1e6:.3g} M parameters"
        part = f", {each['trained'] / 1e6:.3g} M trained" if each["trained"] < each["parameters"] else ""
        hours = [each[gpu] for gpu in ("a100_hours", "h100_hours") if each[gpu] is not None]
        least = f", at least {' or '.join(f'{each:.2g}' for each in hours)} h" if hours else ""
        lines.append(f"  {each['training']}: {each['model']}, {size}{part}, {each['epochs']} epochs{least}{after}")
    if any(each["a100_hours"] is not None for each in plan["trainings"]):
        rate = "by passes and a published rate; see the cost below"
        lines.append(f"  hours: estimates for one A100 or one H100 in half precision, {rate}")
    if plan["models"]:
        lines.append(f"\n{len(plan['models'])} rows with models that others have trained")
    for each in plan["models"]:
        lines.append(f"  {', '.join(each['rows'])}: {each['model']}, {each['parameters'] / 1e6:.3g} M parameters")
    lines.append(f"\n{len(plan['evaluations'])} evaluations")
    for name, each in plan["evaluations"].items():
        attacks = f", {', '.join(each['attacks'])}" if each.get("attacks") else ""
        limit = f", {each['limit']} images" if each.get("limit") else ""
        where = _WITHOUT_DATA.get(each["run"]) or f"{each['run']} on {each['data'] or 'the training'}"
        lines.append(f"  {name}: {where}{limit}{attacks}")
    if plan["files"]:
        lines.append("\nfiles")
    for each in plan["files"]:
        state = "there" if each["there"] else f"missing: {each['gigabytes']:g} GB from {each['where']}"
        lines.append(f"  {each['path']} ({each['data']}): {state}")
    if plan["weights"]:
        lines.append(f"\nweights that timm downloads, if they are not cached: {', '.join(plan['weights'])}")
    if plan["needs"]:
        lines.append("\ncannot be run yet")
        lines += [f"  {name}: needs {what}" for name, what in plan["needs"].items()]
    here = f"\non this machine: {plan['here']}" if "here" in plan else ""
    return "\n".join([*lines, f"\ncost: {plan['cost']}{here}"])
