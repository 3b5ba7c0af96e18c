"""A small taskset in the form of verifiers: answer with the digit that the question shows."""

import verifiers.v1 as vf


class DigitData(vf.TaskData):
    digit: str


class DigitTask(vf.Task[DigitData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.said(trace) == self.data.digit)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(self.said(trace)))

    @staticmethod
    def said(trace) -> str:
        return (trace.last_reply or "").strip()


class DigitTaskset(vf.Taskset[DigitTask, vf.TasksetConfig]):
    def load(self):
        for number in range(100):
            digit = str(number % 10)
            yield DigitTask(DigitData(prompt=f"Say {digit}", digit=digit), self.config.task)


__all__ = ["DigitTaskset"]
