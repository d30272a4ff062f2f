// swift-tools-version: 5.9
import PackageDescription

// Foundation only. To speak through MLX, add ml-explore/mlx-swift to the dependencies and the
// products "MLX" and "MLXRandom" to the target: MLXSpeaker.swift is compiled where they are there.
let package = Package(
    name: "WarbleKit",
    platforms: [.iOS(.v17), .macOS(.v14)],
    products: [.library(name: "WarbleKit", targets: ["WarbleKit"])],
    targets: [
        .target(name: "WarbleKit"),
        .testTarget(
            name: "WarbleKitTests", dependencies: ["WarbleKit"], resources: [.copy("vectors.json")]),
    ]
)
