"""A record of a training for the public registry of deployments of differential privacy, registry.opendp.org.

The fields are those of schemas/deployments-schema.yaml of github.com/opendp/deployments-registry-data, of July 2026
(commit 3e9c812a). Ghazi, Nanayakkara and Vadhan describe the registry in arXiv 2509.13509.
"""

import re
from typing import Any

from privgrad.errors import expected
from privgrad.statement.text import Statement

UNKNOWN = "Not known from the ledger: you must answer."


def registry_record(said: Statement) -> dict[str, Any]:
    """Return the record of a statement, as an object of JSON, which is YAML too: a draft for you to complete.

    Args:
        said: of `statement` or `budget_statement`. The texts are its sentences, and what `about` declares.
    Returns:
        Parts and fields by name. A text that the ledgers do not know is `UNKNOWN`. Fields that are no text and are not
        known are left out: data_product_sector, release_type, data_source_type.
    Raises:
        PrivacyError: the statement begins with no protection, so there is nothing to register.
    Privacy:
        It holds public numbers only, and for a budget the names of its commitments and of who made them.
    """
    if not said.is_guarantee:
        got = said.sections[0].sentences[0]
        raise expected("registry_record", "the statement", "to begin with a protection", got)
    numbers, about = said.numbers, said.about
    name = about.title or about.model or UNKNOWN
    by_heading = {part.heading: "\n".join(f"- {line}" for line in part.sentences) for part in said.sections}
    is_training = "training" in by_heading["Computation"]
    is_of_users, user = numbers["privacy_unit"] == "user", numbers.get("user", "person")
    return {
        "url_slug": re.sub(r"\W+", "-", f"{name if name != UNKNOWN else 'draft'} {numbers['date'][:4]}".lower()),
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": name,
                "data_curators": [UNKNOWN],
                "intended_use": about.purpose or UNKNOWN,
                "data_product_type": "Machine learning model" if is_training else "Summary statistics",
                "data_product_region": UNKNOWN,
                "description": UNKNOWN,
                "publication_date": numbers["date"],
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": about.data or UNKNOWN,
                "unprotected_quantities": by_heading["Not covered"],
            },
            "privacy_loss": {
                "privacy_unit": f"{user.capitalize()}, with all data of this {user}" if is_of_users else "Row",
                "privacy_unit_details": by_heading["People and data"],
                "privacy_parameters": {"epsilon": numbers["epsilon"], "delta": numbers["delta"]},
                "privacy_parameters_details": by_heading["In short"] + "\n" + by_heading["Meaning"],
            },
            "deployment_model": {
                "model_name": "Central",
                "model_name_details": "The one who trains sees the data.",
                "actors": by_heading["Attackers"],
                "release_type_details": UNKNOWN,
                "data_source_type_details": UNKNOWN,
                "access_type": "Non-interactive",
                "access_type_details": UNKNOWN,
            },
            "accounting": {"post_processing": UNKNOWN, "composition": by_heading["Computation"]},
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": UNKNOWN,
                "mechanisms": f"Gaussian noise on sums of clipped values.\n{by_heading['Record']}",
                "justification": UNKNOWN,
            },
            "administrative": {"sources": UNKNOWN, "notes": UNKNOWN, "registry_authors": [UNKNOWN]},
        },
    }
