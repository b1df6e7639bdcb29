"""Write visits.csv: made-up visits of 8,000 patients, for patients_with_visits.toml. No row is a real person."""

import csv
import math
import random
from pathlib import Path

NAMES = ("patient", "age", "sex", "ward", "days", "pressure", "drugs", "returned")


def main(path: str = "visits.csv", patients: int = 8000) -> None:
    source = random.Random(0)
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(NAMES)
        for patient in range(patients):
            age, sex = source.randint(18, 100), source.choice(["female", "male"])
            frailty = source.gauss(0, 1)  # in no column: it makes the visits of a patient alike
            for _ in range(min(12, 1 + int(source.expovariate(0.6)))):
                ward = source.choice(["surgery", "medicine", "cardiology", "eyes"])
                days = min(60, int(source.expovariate(1 / (3 + max(0, frailty)))))
                drugs = min(40, max(0, round(age / 20 + 2 * frailty + source.gauss(0, 1.5))))
                pressure = "" if source.random() < 0.1 else round(source.gauss(115 + age / 4, 15))
                risk = -4.2 + 0.03 * age + 0.25 * drugs + 0.12 * days + 0.8 * (ward == "cardiology")
                returned = source.random() < 1 / (1 + math.exp(-risk))
                writer.writerow([f"p{patient}", age, sex, ward, days, pressure, drugs, ("no", "yes")[returned]])


if __name__ == "__main__":
    main()
