"""`meshflash generate`: generate text with a trained GPT; ranks share the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.ranks import Nproc, rerun


def command(
    prompt: Annotated[str, typer.Argument(help="The text to continue; @FILE reads it from a file.")],
    checkpoint: Annotated[
        Path,
        typer.Option(exists=True, file_okay=False, help="A folder of `meshflash train`, or of a Hugging Face Llama."),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="Softmax temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling: probability of the nucleus.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="A folder with tokenizer.json; bytes by default.")] = None,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks, which share the prompt.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks, which share heads and hidden units.")] = 1,
    fsdp: Annotated[int, typer.Option(min=1, help="Ranks that weights are sharded over.")] = 1,
    order: Annotated[str, typer.Option(help="Order of the mesh axes, fastest first.")] = "cp-tp-dp",
    nproc: Nproc = 1,
) -> None:
    """Continue a text. Ranks share the prompt; afterwards each holds the whole KV cache."""
    rerun(nproc)
    from meshflash.job import init
    from meshflash.train import inference

    with init() as here:
        try:
            text = Path(prompt[1:]).read_text() if prompt.startswith("@") else prompt
            parts = inference.text(
                checkpoint, text, tokenizer, dict(fsdp=fsdp, cp=cp, tp=tp, order=order), tokens=tokens,
                temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
            )  # fmt: skip
            for part in parts:
                if here.rank == 0:
                    typer.echo(part, nl=False)
            if here.rank == 0:
                typer.echo()
        except (ValueError, OSError) as error:
            typer.echo(f"[rank {here.rank}] {error}", err=True)
            raise typer.Exit(1) from error
