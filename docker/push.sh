#!/usr/bin/env bash
# Prints the commands that put an image into Amazon ECR; runs none of them.
# Usage: docker/push.sh IMAGE    (REGISTRY, REPOSITORY and REGION may be set)
set -euo pipefail

image=${1:?usage: docker/push.sh IMAGE}
region=${REGION:-us-east-1}
registry=${REGISTRY:-ACCOUNT.dkr.ecr.$region.amazonaws.com}
repository=${REPOSITORY:-smp-estimator}
tag=$(docker image inspect --format '{{index .Config.Labels "org.opencontainers.image.version"}}' "$image")

cat <<COMMANDS
# Put ACCOUNT and the region in place (or call make push with REGISTRY=... REGION=...), then:
aws ecr create-repository --repository-name $repository --region $region   # once
aws ecr get-login-password --region $region | docker login --username AWS --password-stdin $registry
docker tag $image $registry/$repository:$tag
docker push $registry/$repository:$tag
# and in the notebook: SMPEstimator(..., image_uri="$registry/$repository:$tag")
COMMANDS
