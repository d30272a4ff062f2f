import Foundation

/// Holds work for the GPU up while the app is not in front.
///
///     .onChange(of: scenePhase) { _, phase in phase == .active ? gate.open() : gate.close() }
public final class ForegroundGate: @unchecked Sendable {
    private let condition = NSCondition()
    private var isOpen: Bool
    private var isCancelled = false

    public init(isOpen: Bool = true) { self.isOpen = isOpen }

    /// The app is in front: whoever waits goes on.
    public func open() { change { isOpen = true } }

    /// The app is leaving the front: what is being computed is finished, nothing new begins.
    public func close() { change { isOpen = false } }

    /// Whoever waits or comes gives up with `WarbleError.background`.
    public func cancel() { change { isCancelled = true } }

    /// Return at once while open, else wait for it.
    public func pass() throws {
        condition.lock()
        defer { condition.unlock() }
        while !isOpen && !isCancelled { condition.wait() }
        if isCancelled { throw WarbleError.background }
    }

    private func change(_ body: () -> Void) {
        condition.lock()
        body()
        condition.broadcast()
        condition.unlock()
    }
}
