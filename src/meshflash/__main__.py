"""`python -m meshflash`, for where the `meshflash` script is not on PATH."""

from meshflash.cli import app

if __name__ == "__main__":
    app(prog_name="meshflash")
