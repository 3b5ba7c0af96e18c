# rloss in an image: built in one stage, run in another that holds the binary, the recipes and python3 for tasks and the tool.
# The lines between "build" and "end" are run by .ci/docker_lines in a bare folder; the image itself is built nowhere here.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
# build
RUN cargo build --release --locked
RUN strip target/release/rloss
RUN scripts/dependencies.py licences target/licences
# end

FROM debian:bookworm-slim
RUN apt-get update && apt-get install --yes --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/target/release/rloss /usr/local/bin/rloss
COPY --from=build /src/recipes /usr/share/rloss/recipes
COPY --from=build /src/LICENSE /usr/share/rloss/LICENSE
COPY --from=build /src/target/licences /usr/share/rloss/licences
# Model-written Python is confined by landlock and seccomp; Docker's default profile lets both through.
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["rloss"]
