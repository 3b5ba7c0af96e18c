"""A small taskset of verifiers with a tool server: what do some fruits cost?"""

import verifiers.v1 as vf

PRICES = {"apple": 3, "pear": 4, "plum": 2}


class ShopToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, fruit: str) -> str:
        """The price of one fruit."""
        return str(PRICES[fruit])


class ShopData(vf.TaskData):
    answer: str


class ShopConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopTask(vf.Task[ShopData, vf.State, ShopConfig]):
    @classmethod
    def toolsets(cls, config: ShopConfig) -> list[vf.Toolset]:
        return [ShopToolset(config.tools)]

    @vf.reward
    async def right(self, trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class ShopTasksetConfig(vf.TasksetConfig):
    task: ShopConfig = ShopConfig()


class ShopTaskset(vf.Taskset[ShopTask, ShopTasksetConfig]):
    def load(self):
        for fruit, price in PRICES.items():
            for count in range(2, 10):
                prompt = f"What do {count} {fruit}s cost? Answer with the number alone."
                yield ShopTask(ShopData(prompt=prompt, answer=str(count * price)), self.config.task)


__all__ = ["ShopTaskset"]

if __name__ == "__main__":
    ShopToolset.run()
